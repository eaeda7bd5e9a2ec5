//! Codes blocks whose scales are known, on all threads and with the best instructions.

use half::f16;
use pulp::Simd;
use rayon::prelude::*;

use super::viterbi::{Scratch, Search, Trellis};
use crate::codebook;
use crate::error::EncodeError;
use crate::format::Geometry;
use crate::pack;

/// The instructions the search uses. All give the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum EncodeLevel {
    /// The fastest that this machine has.
    #[default]
    Best,
    /// Four blocks at a time in plain Rust. Works everywhere.
    Scalar,
    /// Eight blocks at a time (x86-64 with AVX2 and FMA).
    Avx2,
    /// Sixteen blocks at a time (x86-64 with AVX-512 F, BW, CD, DQ and VL).
    Avx512,
    /// Four blocks at a time (AArch64).
    Neon,
}

impl EncodeLevel {
    /// The levels that this machine has, slowest first, without [`EncodeLevel::Best`].
    pub fn available() -> Vec<Self> {
        [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|&level| Runner::new(level).is_some())
            .collect()
    }
}

/// A level that was found on this machine.
#[derive(Clone, Copy)]
enum Runner {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(pulp::x86::V3),
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
    #[cfg(target_arch = "aarch64")]
    Neon(pulp::aarch64::Neon),
}

impl Runner {
    fn new(level: EncodeLevel) -> Option<Self> {
        match level {
            EncodeLevel::Best => [EncodeLevel::Avx512, EncodeLevel::Avx2, EncodeLevel::Neon]
                .into_iter()
                .find_map(Self::new)
                .or(Some(Self::Scalar)),
            EncodeLevel::Scalar => Some(Self::Scalar),
            #[cfg(target_arch = "x86_64")]
            EncodeLevel::Avx2 => pulp::x86::V3::try_new().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            EncodeLevel::Avx512 => pulp::x86::V4::try_new().map(Self::Avx512),
            #[cfg(target_arch = "aarch64")]
            EncodeLevel::Neon => pulp::aarch64::Neon::try_new().map(Self::Neon),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    /// The level of half this one's lanes, where there is one that is faster for half as many blocks.
    fn narrow(self) -> Option<Self> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Self::new(EncodeLevel::Avx2),
            _ => None,
        }
    }
}

/// A block to code.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    /// `[T]`
    pub(super) weights: &'a [f32],
    /// Not zero.
    pub(super) scale: f16,
}

/// Some blocks coded: as many as a register has lanes.
pub(super) struct Batch {
    /// `[blocks, wpb]`
    codes: Vec<u32>,
    /// `[blocks]`
    squared_errors: Vec<f64>,
}

impl Batch {
    /// The code words and the squared error of every block.
    pub(super) fn blocks(&self, geometry: &Geometry) -> impl Iterator<Item = (&[u32], f64)> {
        self.codes.chunks_exact(geometry.words_per_block()).zip(self.squared_errors.iter().copied())
    }
}

/// Codes blocks of one geometry.
pub(super) struct Coder {
    geometry: Geometry,
    runner: Runner,
    trellis: Trellis,
}

impl Coder {
    pub(super) fn new(geometry: &Geometry, level: EncodeLevel) -> Result<Self, EncodeError> {
        let runner = Runner::new(level).ok_or(EncodeError::LevelUnavailable { level })?;
        Ok(Self { geometry: *geometry, runner, trellis: Trellis::new(geometry) })
    }

    /// Codes blocks, in their order; `progress` is told of weights finished.
    pub(super) fn code(&self, blocks: &[Block<'_>], progress: &(dyn Fn(usize) + Sync)) -> Vec<Batch> {
        match self.runner {
            Runner::Scalar => self.run(pulp::Scalar128b, blocks, progress),
            #[cfg(target_arch = "x86_64")]
            Runner::Avx2(simd) => self.run(simd, blocks, progress),
            #[cfg(target_arch = "x86_64")]
            Runner::Avx512(simd) => self.run(simd, blocks, progress),
            #[cfg(target_arch = "aarch64")]
            Runner::Neon(simd) => self.run(simd, blocks, progress),
        }
    }

    /// The same coder for batches of at most `blocks` blocks: registers no wider than they fill.
    pub(super) fn for_few(mut self, blocks: usize) -> Self {
        if blocks <= 8
            && let Some(narrow) = self.runner.narrow()
        {
            self.runner = narrow;
        }
        self
    }

    /// Working memory for [`Coder::code_with`].
    pub(super) fn scratch(&self) -> Scratch {
        let lanes = match self.runner {
            Runner::Scalar => pulp::Scalar128b::F32_LANES,
            #[cfg(target_arch = "x86_64")]
            Runner::Avx2(_) => pulp::x86::V3::F32_LANES,
            #[cfg(target_arch = "x86_64")]
            Runner::Avx512(_) => pulp::x86::V4::F32_LANES,
            #[cfg(target_arch = "aarch64")]
            Runner::Neon(_) => pulp::aarch64::Neon::F32_LANES,
        };
        Scratch::new(&self.trellis, lanes)
    }

    /// [`Coder::code`] for few blocks, again and again: those of one register on this thread.
    pub(super) fn code_with(&self, scratch: &mut Scratch, blocks: &[Block<'_>]) -> Vec<Batch> {
        if blocks.len() > scratch.lanes() {
            return self.code(blocks, &|_| {});
        }
        vec![match self.runner {
            Runner::Scalar => self.batch(pulp::Scalar128b, scratch, blocks),
            #[cfg(target_arch = "x86_64")]
            Runner::Avx2(simd) => self.batch(simd, scratch, blocks),
            #[cfg(target_arch = "x86_64")]
            Runner::Avx512(simd) => self.batch(simd, scratch, blocks),
            #[cfg(target_arch = "aarch64")]
            Runner::Neon(simd) => self.batch(simd, scratch, blocks),
        }]
    }

    fn run<S: Simd>(&self, simd: S, blocks: &[Block<'_>], progress: &(dyn Fn(usize) + Sync)) -> Vec<Batch> {
        let scratch = || Scratch::new(&self.trellis, S::F32_LANES);
        let batch = |scratch: &mut Scratch, blocks: &[Block<'_>]| {
            let batch = self.batch(simd, scratch, blocks);
            progress(blocks.len() * self.geometry.block());
            batch
        };
        blocks.par_chunks(S::F32_LANES).map_init(scratch, batch).collect()
    }

    fn batch<S: Simd>(&self, simd: S, scratch: &mut Scratch, blocks: &[Block<'_>]) -> Batch {
        let g = &self.geometry;
        // The last batch may leave lanes over; what is in them is searched and thrown away.
        for (lane, block) in blocks.iter().enumerate() {
            let scale = block.scale.to_f32();
            for (x, &w) in scratch.x.get()[lane..].iter_mut().step_by(S::F32_LANES).zip(block.weights) {
                *x = w / scale;
            }
        }
        simd.vectorize(Search { trellis: &self.trellis, scratch });

        let mut codes = vec![0; blocks.len() * g.words_per_block()];
        let paths = scratch.states.chunks_exact(g.block());
        let squared_errors = paths
            .zip(codes.chunks_exact_mut(g.words_per_block()))
            .zip(blocks)
            .map(|((states, ring), block)| {
                pack::pack_block(g, states, ring).expect("the path starts and ends in the same overlap");
                let scale = block.scale.to_f32();
                let error = |(&w, &s): (&f32, &u32)| {
                    let error = f64::from(w) - f64::from(codebook::exact(codebook::y(s)) * scale);
                    error * error
                };
                block.weights.iter().zip(states).map(error).sum()
            })
            .collect();
        Batch { codes, squared_errors }
    }
}
