//! States to code words and back. Tail-biting and block interleave live here and nowhere else.

use crate::error::PackError;
use crate::format::{Geometry, INTERLEAVE_WORDS, Layout, WORD_BITS};

/// The `state_bits`-bit window that starts at bit `offset` of a block's ring, wrapping at its end.
///
/// `ring` holds the block's words; `offset` is below `32 * ring.len()` and `state_bits` at most 16.
#[inline]
pub fn window(ring: &[u32], offset: usize, state_bits: u32) -> u32 {
    let word = offset / WORD_BITS;
    let next = if word + 1 == ring.len() { 0 } else { word + 1 };
    let pair = u64::from(ring[word]) | (u64::from(ring[next]) << WORD_BITS);
    (pair >> (offset % WORD_BITS)) as u32 & ((1 << state_bits) - 1)
}

/// Packs the states of one block (`T` of them) into its ring of `T*k/32` words.
///
/// # Errors
/// A slice of the wrong length, a state of more than `L` bits, or neighbours (the last and the first too) that
/// do not share `L-k` bits.
pub fn pack_block(geometry: &Geometry, states: &[u32], ring: &mut [u32]) -> Result<(), PackError> {
    let (k, l) = (geometry.bits(), geometry.state_bits());
    check_len("states of a block", states.len(), geometry.block())?;
    check_len("words of a block", ring.len(), geometry.words_per_block())?;
    if let Some(weight) = states.iter().position(|&s| s >> l != 0) {
        return Err(PackError::StateRange { weight, state: states[weight], state_bits: l });
    }
    let overlap = (1u32 << (l - k)) - 1;
    for (t, &state) in states.iter().enumerate() {
        let next = states[(t + 1) % states.len()];
        if next >> k != state & overlap {
            return Err(PackError::Broken { weight: t, state, next });
        }
    }
    ring.fill(0);
    for (t, &state) in states.iter().enumerate() {
        // The k bits at the window's start; all other bits of the state belong to the symbols before it.
        let offset = geometry.window_offset(t);
        let symbol = u64::from(state & ((1 << k) - 1)) << (offset % WORD_BITS);
        ring[offset / WORD_BITS] |= symbol as u32;
        if symbol >> WORD_BITS != 0 {
            ring[offset / WORD_BITS + 1] |= (symbol >> WORD_BITS) as u32;
        }
    }
    Ok(())
}

/// Reads the states of one block from its ring.
///
/// # Errors
/// A slice of the wrong length.
pub fn unpack_block(geometry: &Geometry, ring: &[u32], states: &mut [u32]) -> Result<(), PackError> {
    check_len("states of a block", states.len(), geometry.block())?;
    check_len("words of a block", ring.len(), geometry.words_per_block())?;
    for (t, state) in states.iter_mut().enumerate() {
        *state = window(ring, geometry.window_offset(t), geometry.state_bits());
    }
    Ok(())
}

/// Packs the states `[rows, cols]` of a whole matrix into codes of the geometry's layout.
///
/// # Errors
/// As [`pack_block`].
pub fn pack(geometry: &Geometry, states: &[u32]) -> Result<Vec<u32>, PackError> {
    check_len("states", states.len(), geometry.rows() * geometry.cols())?;
    let mut codes = vec![0; geometry.words()];
    for (i, block) in states.chunks_exact(geometry.block()).enumerate() {
        let at = geometry.block_offset(i / geometry.blocks_per_row(), i % geometry.blocks_per_row());
        pack_block(geometry, block, &mut codes[at..at + geometry.words_per_block()])?;
    }
    Ok(codes)
}

/// Reads the states `[rows, cols]` of a whole matrix.
///
/// # Errors
/// Codes of the wrong length.
pub fn unpack(geometry: &Geometry, codes: &[u32]) -> Result<Vec<u32>, PackError> {
    check_len("codes", codes.len(), geometry.words())?;
    let mut states = vec![0; geometry.rows() * geometry.cols()];
    for (i, block) in states.chunks_exact_mut(geometry.block()).enumerate() {
        let at = geometry.block_offset(i / geometry.blocks_per_row(), i % geometry.blocks_per_row());
        unpack_block(geometry, &codes[at..at + geometry.words_per_block()], block)?;
    }
    Ok(states)
}

/// Moves codes from the geometry's layout into `layout`; returns the new codes and their geometry.
///
/// # Errors
/// Codes of the wrong length, or a geometry that `layout` does not allow.
pub fn relayout(
    geometry: &Geometry,
    codes: &[u32],
    layout: Layout,
) -> Result<(Vec<u32>, Geometry), PackError> {
    check_len("codes", codes.len(), geometry.words())?;
    let target = geometry.with_layout(layout)?;
    let wpb = geometry.words_per_block();
    let mut out = vec![0; codes.len()];
    for row in 0..geometry.rows() {
        for block in 0..geometry.blocks_per_row() {
            let (from, to) = (geometry.block_offset(row, block), target.block_offset(row, block));
            out[to..to + wpb].copy_from_slice(&codes[from..from + wpb]);
        }
    }
    Ok((out, target))
}

const _: () = assert!(INTERLEAVE_WORDS.is_multiple_of(2));

fn check_len(what: &'static str, found: usize, expected: usize) -> Result<(), PackError> {
    if found == expected { Ok(()) } else { Err(PackError::Length { what, found, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Axis;

    /// The format, frozen as literal bytes: one block of 32 weights at k = 1, L = 2, in which state t is the two
    /// bits at offset 31-t.
    #[test]
    fn frozen_block() {
        let g = Geometry::new(Axis::Input, 1, 2, 32, 1, 32).unwrap();
        let ring = [0x8000_0001u32];
        let states = unpack(&g, &ring).unwrap();
        // Weight 0 starts at bit 31 (set) and wraps to bit 0 (set); weight 31 starts at bit 0, reaching bit 1.
        assert_eq!(states[0], 0b11);
        assert_eq!(states[1], 0b10);
        assert_eq!(states[30], 0b00);
        assert_eq!(states[31], 0b01);
        assert_eq!(pack(&g, &states).unwrap(), ring);
    }

    #[test]
    fn a_symbol_across_two_words() {
        // k = 3: weight T-1-10 starts at bit 30 and crosses into word 1.
        let g = Geometry::new(Axis::Input, 3, 8, 32, 1, 32).unwrap();
        let ring = [0xC000_0000u32, 0x0000_0001, 0];
        let states = unpack(&g, &ring).unwrap();
        assert_eq!(states[31 - 10], 0b111);
        assert_eq!(pack(&g, &states).unwrap(), ring);
    }

    #[test]
    fn broken_chains_are_refused() {
        let g = Geometry::new(Axis::Input, 1, 2, 32, 1, 32).unwrap();
        let mut states = vec![0u32; 32];
        states[5] = 1;
        assert!(matches!(pack(&g, &states), Err(PackError::Broken { weight: 5, .. })));
        states[5] = 4;
        assert!(matches!(pack(&g, &states), Err(PackError::StateRange { weight: 5, state: 4, .. })));
        assert!(matches!(pack(&g, &states[1..]), Err(PackError::Length { .. })));
    }
}
