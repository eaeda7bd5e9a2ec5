//! The search: tail-biting Viterbi over the `2^L` states, several blocks at once.
//!
//! A SIMD register holds one number for each of `LANES` blocks, so the same scalar-looking code serves every
//! geometry and every register width, nothing is ever permuted across lanes, and a block's result cannot
//! depend on how many blocks ran beside it. (Lanes across the states of one block were the alternative: they
//! need a transposition by `2^k` after every step.)
//!
//! Only the least cost of each overlap (the `L-k` bits that a state shares with its successor) is kept. With
//! `H = 2^(L-k)` overlaps and `B = 2^k` branches, the states that end in overlap `h` are `s = j*H + h`, and
//! each continues overlap `s >> k`:
//!
//! ```text
//! next[h] = min over j < B of  best[(j*H + h) >> k] + (x - value(j*H + h))^2
//! ```
//!
//! A tie takes the least `j`, that is the lowest state, and a free path ends in the lowest overlap of least
//! cost. All arithmetic is one rounded binary32 operation at a time (never a fused multiply-add), which makes
//! the bytes the same on every machine. (Looking up the squares, of which there are at most 1021 different
//! ones a step, was no faster: an index costs what a subtraction and a product do.)
//!
//! Tail-biting is QTIP's Algorithm 4 (arXiv 2406.11235, section 4): a free pass over the block rotated by
//! half fixes the overlap at the block's boundary, where it sits in the middle of that path and so sees
//! context on both sides; then a pass over the block itself starts and ends in that overlap.

use pulp::{Simd, WithSimd};

use crate::codebook;
use crate::format::Geometry;

/// What the search knows about a geometry, shared by all threads.
pub(super) struct Trellis {
    bits: u32,
    state_bits: u32,
    block: usize,
    /// `[H, B]`: the value of state `j*H + h`.
    values: Vec<f32>,
}

impl Trellis {
    pub(super) fn new(geometry: &Geometry) -> Self {
        let (bits, state_bits) = (geometry.bits(), geometry.state_bits());
        let (overlaps, branches) = (1u32 << (state_bits - bits), 1u32 << bits);
        let values = (0..overlaps)
            .flat_map(|h| (0..branches).map(move |j| j * overlaps + h))
            .map(|state| codebook::exact(codebook::y(state)))
            .collect();
        Self { bits, state_bits, block: geometry.block(), values }
    }

    fn overlaps(&self) -> usize {
        1 << (self.state_bits - self.bits)
    }

    /// Back pointers in a 32-bit word: as many as fit, rounded down to a power of two.
    fn fields(&self) -> usize {
        let fit = 32 / self.bits as usize;
        (1 << fit.ilog2()).min(self.overlaps())
    }

    /// Words of back pointers for one step and lane.
    fn words(&self) -> usize {
        self.overlaps() / self.fields()
    }
}

/// One thread's working memory, used again for batch after batch.
pub(super) struct Scratch {
    lanes: usize,
    /// `[T, lanes]`: the blocks' weights divided by their scales. The caller fills it.
    pub(super) x: Aligned<f32>,
    /// `[lanes, T]`: the result.
    pub(super) states: Vec<u32>,
    best: Aligned<f32>,
    next: Aligned<f32>,
    back: Aligned<u32>,
    overlap: Vec<usize>,
}

impl Scratch {
    pub(super) fn new(trellis: &Trellis, lanes: usize) -> Self {
        Self {
            lanes,
            x: Aligned::new(trellis.block * lanes),
            states: vec![0; trellis.block * lanes],
            best: Aligned::new(trellis.overlaps() * lanes),
            next: Aligned::new(trellis.overlaps() * lanes),
            back: Aligned::new(trellis.block * trellis.words() * lanes),
            overlap: vec![0; lanes],
        }
    }

    /// Blocks searched at once.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }
}

/// A slice that starts on a cache line, so that no register-wide access straddles two.
pub(super) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    const LINE: usize = 64;

    fn new(len: usize) -> Self {
        let data = vec![T::default(); len + Self::LINE / size_of::<T>()];
        // An offset that cannot be had costs speed only.
        let start = data.as_ptr().align_offset(Self::LINE).min(data.len() - len);
        Self { data, start, len }
    }

    pub(super) fn get(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }
}

/// Finds the states of the `S::F32_LANES` blocks in `scratch.x` and leaves them in `scratch.states`.
pub(super) struct Search<'a> {
    pub(super) trellis: &'a Trellis,
    pub(super) scratch: &'a mut Scratch,
}

impl WithSimd for Search<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        debug_assert_eq!(self.scratch.lanes, S::F32_LANES);
        match self.trellis.bits {
            1 => search::<S, 2>(simd, self.trellis, self.scratch),
            2 => search::<S, 4>(simd, self.trellis, self.scratch),
            3 => search::<S, 8>(simd, self.trellis, self.scratch),
            _ => search::<S, 16>(simd, self.trellis, self.scratch),
        }
    }
}

#[inline(always)]
fn search<S: Simd, const B: usize>(simd: S, trellis: &Trellis, scratch: &mut Scratch) {
    let lanes = S::F32_LANES;
    let (block, half) = (trellis.block, trellis.block / 2);
    let step_words = trellis.words() * lanes;
    let x = S::as_simd_f32s(scratch.x.get()).0;
    let (mut best, mut next) = (scratch.best.get(), scratch.next.get());
    let back = scratch.back.get();

    // Only the second half of the free path is traced: the boundary is in its middle.
    best.fill(0.0);
    for t in 0..block {
        let x = x[(t + half) % block];
        let (from, to) = (S::as_simd_f32s(best).0, S::as_mut_simd_f32s(next).0);
        if t < half {
            step::<S, B, false>(simd, trellis, x, from, to, &mut []);
        } else {
            let back = &mut back[(t - half) * step_words..][..step_words];
            step::<S, B, true>(simd, trellis, x, from, to, S::as_mut_simd_u32s(back).0);
        }
        std::mem::swap(&mut best, &mut next);
    }
    for (lane, overlap) in scratch.overlap.iter_mut().enumerate() {
        let mut h = 0;
        for candidate in 1..trellis.overlaps() {
            if best[candidate * lanes + lane] < best[h * lanes + lane] {
                h = candidate;
            }
        }
        for t in (half..block).rev() {
            h = state_before(trellis, &back[(t - half) * step_words..], lanes, lane, h) >> trellis.bits;
        }
        *overlap = h;
    }

    best.fill(f32::INFINITY);
    for (lane, &h) in scratch.overlap.iter().enumerate() {
        best[h * lanes + lane] = 0.0;
    }
    for (t, back) in back.chunks_exact_mut(step_words).enumerate() {
        let x = x[t];
        let (from, to) = (S::as_simd_f32s(best).0, S::as_mut_simd_f32s(next).0);
        step::<S, B, true>(simd, trellis, x, from, to, S::as_mut_simd_u32s(back).0);
        std::mem::swap(&mut best, &mut next);
    }
    for (lane, states) in scratch.states.chunks_exact_mut(block).enumerate() {
        let mut h = scratch.overlap[lane];
        for (state, back) in states.iter_mut().zip(back.chunks_exact(step_words)).rev() {
            let s = state_before(trellis, back, lanes, lane, h);
            *state = s as u32;
            h = s >> trellis.bits;
        }
    }
}

/// `(x - value)^2`.
#[inline(always)]
fn square_error<S: Simd>(simd: S, x: S::f32s, value: f32) -> S::f32s {
    let difference = simd.sub_f32s(x, simd.splat_f32s(value));
    simd.mul_f32s(difference, difference)
}

/// One step of the recurrence at the top of this file for every overlap; with `TRACE` the `j` chosen go to
/// `back`, [`Trellis::fields`] to a word, the lowest overlap in the highest bits.
#[inline(always)]
fn step<S: Simd, const B: usize, const TRACE: bool>(
    simd: S,
    trellis: &Trellis,
    x: S::f32s,
    best: &[S::f32s],
    next: &mut [S::f32s],
    back: &mut [S::u32s],
) {
    let bits = B.ilog2();
    let overlaps = trellis.overlaps();
    let fields = trellis.fields();
    // Overlaps of one chunk have the same B predecessors.
    let chunk = B.min(fields);
    let shift = simd.splat_u32s(bits);
    let branch: [S::u32s; B] = std::array::from_fn(|j| simd.splat_u32s(j as u32));
    let (values, _) = trellis.values.as_chunks::<B>();
    let words = next.chunks_exact_mut(fields).zip(values.chunks_exact(fields));
    for (word, (next, values)) in words.enumerate() {
        let mut chosen = simd.splat_u32s(0);
        let chunks = next.chunks_exact_mut(chunk).zip(values.chunks_exact(chunk));
        for (i, (next, values)) in chunks.enumerate() {
            let tail = (word * fields + i * chunk) >> bits;
            let from: [S::f32s; B] = std::array::from_fn(|j| best[((j * overlaps) >> bits) + tail]);
            for (next, values) in next.iter_mut().zip(values) {
                let mut least = simd.add_f32s(from[0], square_error(simd, x, values[0]));
                let mut arg = branch[0];
                for j in 1..B {
                    let cost = simd.add_f32s(from[j], square_error(simd, x, values[j]));
                    if TRACE {
                        arg = simd.select_u32s(simd.less_than_f32s(cost, least), branch[j], arg);
                    }
                    least = simd.min_f32s(cost, least);
                }
                *next = least;
                if TRACE {
                    chosen = simd.or_u32s(simd.wrapping_dyn_shl_u32s(chosen, shift), arg);
                }
            }
        }
        if TRACE {
            back[word] = chosen;
        }
    }
}

/// The state that `back`, one step's pointers, says the path of `lane` was in when it reached overlap `h`.
#[inline(always)]
fn state_before(trellis: &Trellis, back: &[u32], lanes: usize, lane: usize, h: usize) -> usize {
    let fields = trellis.fields();
    let word = back[h / fields * lanes + lane];
    let field = (fields - 1 - h % fields) as u32;
    let j = (word >> (field * trellis.bits)) as usize & ((1 << trellis.bits) - 1);
    j * trellis.overlaps() + h
}
