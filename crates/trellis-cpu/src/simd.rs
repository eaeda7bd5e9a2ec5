//! The driver shared by the vector levels, and the operations that a level must have ([`Lanes`]).
//!
//! Everything moves in *groups* of [`Lanes::LANES`] consecutive weights. A group's windows start at a whole byte of
//! the ring, because `LANES * k` is a multiple of 8, and span at most 8 bytes (12 for 16 lanes at `k` = 4). So one
//! short load, the same constant shuffle for every group and a mask give all states of a group.
//!
//! Products decode a *tile* of [`ROWS`] stored rows by `GROUPS` groups once, then use it for every row of x: axis 0
//! adds `weight * broadcast(x)` to sums that live in memory, loaded and stored once a tile and not once a weight;
//! axis 1 adds `weight * x` to one vector of sums for each stored row. `k` is a constant of the code so that a
//! tile's groups lie at constant distances: with one bounds check a tile and row, not one a group, the decode's own
//! operations are what takes the time. Rejected: decoding a panel to memory first (the same arithmetic and a pass
//! over the cache more), and one kernel for each m (the decode bounds m = 1 and the fmas bound large m anyway).
//!
//! Everything here and in the level's operations is `inline(always)`, without closures around vectors, so that it ends
//! up inside [`Lanes::run`]'s function, the only one compiled with the level's instructions. What stays outside is
//! right but some twenty times slower.
#![expect(
    clippy::needless_range_loop,
    reason = "counted loops over several arrays unroll; their iterators do not"
)]

use std::hint::black_box;
use std::marker::PhantomData;

use half::{bf16, f16};
use trellis_codec::Geometry;
use trellis_codec::codebook::CODE_RECIPROCAL;
use trellis_codec::format::CODE_DIVISOR;
use trellis_codec::reference::Dtype;

use crate::element::Slots;
use crate::task::{DecodeTask, InputTask, Job, OutputTask, Weights};

/// Stored rows of a tile.
const ROWS: usize = 4;
/// Most lanes and groups of any level's tile.
const MAX_LANES: usize = 16;
const MAX_GROUPS: usize = 4;

/// A level: a value of an implementing type is proof that the machine has the instructions its methods use.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// `LANES` binary32 numbers.
    type V: Copy;
    /// What decoding needs for one `k` and `L`.
    type Code: Copy;

    const LANES: usize;
    /// Groups of a tile.
    const GROUPS: usize;

    /// Runs `kernel` in a function compiled with the level's instructions.
    fn run<K: Kernel>(self, kernel: K);

    fn code(self, bits: u32, state_bits: u32) -> Self::Code;
    /// `y` of the group in `window`, for the `K` bits that `code` is for. The group's last weight is the highest lane
    /// and starts at bit 0.
    fn group<const K: u32>(self, code: &Self::Code, window: Window) -> Self::V;

    fn splat(self, value: f32) -> Self::V;
    /// Asks for the cache line of the first word.
    fn prefetch(self, words: &[u32]);
    /// The first `LANES` elements.
    fn load(self, from: &[f32]) -> Self::V;
    /// To the first `LANES` elements.
    fn store(self, v: Self::V, to: &mut [f32]);
    fn store_f16(self, v: Self::V, to: &mut [f16]);
    fn store_bf16(self, v: Self::V, to: &mut [bf16]);
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a * b`, rounded once.
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn round_f16(self, v: Self::V) -> Self::V;
    fn round_bf16(self, v: Self::V) -> Self::V;
}

/// Work that a level runs.
pub(crate) trait Kernel {
    fn run<S: Lanes>(self, s: S);
}

/// How a weight is formed from `y`.
trait Form {
    fn weight<S: Lanes>(s: S, y: S::V, scale: S::V) -> S::V;
}

struct Packed;
struct Factored;
struct ExpandedF32;
struct ExpandedF16;
struct ExpandedBf16;

impl Form for Packed {
    #[inline(always)]
    fn weight<S: Lanes>(s: S, y: S::V, scale: S::V) -> S::V {
        s.mul(s.mul(y, s.splat(CODE_RECIPROCAL)), scale)
    }
}

impl Form for Factored {
    #[inline(always)]
    fn weight<S: Lanes>(_: S, y: S::V, _: S::V) -> S::V {
        y
    }
}

impl Form for ExpandedF32 {
    #[inline(always)]
    fn weight<S: Lanes>(s: S, y: S::V, scale: S::V) -> S::V {
        let (d, r) = (s.splat(CODE_DIVISOR), s.splat(CODE_RECIPROCAL));
        let q = s.mul(y, r);
        s.mul(s.fma(s.fnma(q, d, y), r, q), scale)
    }
}

impl Form for ExpandedF16 {
    #[inline(always)]
    fn weight<S: Lanes>(s: S, y: S::V, scale: S::V) -> S::V {
        s.round_f16(ExpandedF32::weight(s, y, scale))
    }
}

impl Form for ExpandedBf16 {
    #[inline(always)]
    fn weight<S: Lanes>(s: S, y: S::V, scale: S::V) -> S::V {
        s.round_bf16(ExpandedF32::weight(s, y, scale))
    }
}

pub(crate) fn output<S: Lanes>(s: S, task: OutputTask<'_>) {
    match task.job.weights {
        Weights::Packed => s.run(Output(task, PhantomData::<Packed>)),
        Weights::Factored => s.run(Output(task, PhantomData::<Factored>)),
        Weights::Expanded(Dtype::F32) => s.run(Output(task, PhantomData::<ExpandedF32>)),
        Weights::Expanded(Dtype::F16) => s.run(Output(task, PhantomData::<ExpandedF16>)),
        Weights::Expanded(Dtype::Bf16) => s.run(Output(task, PhantomData::<ExpandedBf16>)),
    }
}

pub(crate) fn input<S: Lanes>(s: S, task: InputTask<'_>) {
    match task.job.weights {
        Weights::Packed => s.run(Input(task, PhantomData::<Packed>)),
        Weights::Factored => s.run(Input(task, PhantomData::<Factored>)),
        Weights::Expanded(Dtype::F32) => s.run(Input(task, PhantomData::<ExpandedF32>)),
        Weights::Expanded(Dtype::F16) => s.run(Input(task, PhantomData::<ExpandedF16>)),
        Weights::Expanded(Dtype::Bf16) => s.run(Input(task, PhantomData::<ExpandedBf16>)),
    }
}

pub(crate) fn decode<S: Lanes>(s: S, task: DecodeTask<'_>) {
    let (job, row) = (task.job, task.rows.start);
    match (task.out, job.weights) {
        (Slots::F32(out), Weights::Packed) => s.run(Decode { job, row, out, form: PhantomData::<Packed> }),
        // Rounding is the store's.
        (Slots::F32(out), _) => s.run(Decode { job, row, out, form: PhantomData::<ExpandedF32> }),
        (Slots::F16(out), _) => s.run(Decode { job, row, out, form: PhantomData::<ExpandedF32> }),
        (Slots::Bf16(out), _) => s.run(Decode { job, row, out, form: PhantomData::<ExpandedF32> }),
    }
}

/// The 8 bytes of ring that hold a group's windows, and the 8 that start four bytes on, which only groups of more
/// than 6 bytes need.
pub(crate) type Window = [u64; 2];

/// The window at `byte` of a ring, wrapping at its end as often as it takes.
#[inline(always)]
fn ring_window(ring: &[u32], byte: usize) -> Window {
    let next = |i: usize| if i + 1 == ring.len() { 0 } else { i + 1 };
    let first = byte / 4;
    let (second, third, fourth) = (next(first), next(next(first)), next(next(next(first))));
    let qword = |a: usize, b: usize, c: usize| {
        let words = u128::from(ring[a]) | u128::from(ring[b]) << 32 | u128::from(ring[c]) << 64;
        (words >> (byte % 4 * 8)) as u64
    };
    [qword(first, second, third), qword(second, third, fourth)]
}

fn as_bytes(words: &[u32]) -> &[u8] {
    // SAFETY: the words are initialised memory of `size_of_val` bytes, and u8 has no alignment or validity to meet.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// A tile's weights: `GROUPS` of its groups for each row.
type Tile<S> = [[<S as Lanes>::V; MAX_GROUPS]; ROWS];

/// How the blocks of a matrix with `K` bits a weight are decoded.
struct Decoder<S: Lanes, F, const K: u32> {
    code: S::Code,
    /// Groups in a block.
    groups: usize,
    form: PhantomData<F>,
}

impl<S: Lanes, F: Form, const K: u32> Decoder<S, F, K> {
    /// Bytes of ring between two groups.
    const STEP: usize = S::LANES * K as usize / 8;
    /// Whether a group's windows span more than 8 bytes.
    const WIDE: bool = S::LANES * K as usize > 48;
    /// Bytes that a level reads of a group.
    const SPAN: usize = if Self::WIDE { 12 } else { 8 };

    #[inline(always)]
    fn new(s: S, geometry: &Geometry) -> Self {
        const { assert!(S::GROUPS <= MAX_GROUPS && S::LANES <= MAX_LANES) };
        Self {
            code: s.code(K, geometry.state_bits()),
            groups: geometry.block() / S::LANES,
            form: PhantomData,
        }
    }

    /// The first byte of a group. Time runs towards lower offsets, so the block's last group starts at byte 0.
    #[inline(always)]
    fn byte(&self, group: usize) -> usize {
        (self.groups - 1 - group) * Self::STEP
    }

    /// Whether a group can be read from the ring without wrapping.
    #[inline(always)]
    fn is_inside(&self, group: usize, ring: &[u32]) -> bool {
        self.byte(group) + Self::SPAN <= 4 * ring.len()
    }

    /// The weights of a group from the two halves of its window, of which the second matters only to wide groups.
    #[inline(always)]
    fn weights(&self, s: S, [low, high]: [&[u8]; 2], scale: S::V) -> S::V {
        let qword = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().expect("8 bytes of a window"));
        let window = [qword(low), if Self::WIDE { qword(high) } else { 0 }];
        F::weight(s, s.group::<K>(&self.code, window), scale)
    }

    /// The tile's weights of one row, if all but the block's first group are inside the ring; that is in `seam`.
    #[inline(always)]
    fn row(&self, s: S, seam: &[[u8; 8]; 2], ring: &[u32], scale: S::V, group: usize) -> [S::V; MAX_GROUPS] {
        let bytes = as_bytes(ring);
        let first = if group == 0 {
            [&seam[0][..], &seam[1][..]]
        } else {
            let low = &bytes[self.byte(group)..];
            [low, &low[Self::SPAN - 8..]]
        };
        let mut weights = [self.weights(s, first, scale); MAX_GROUPS];
        let rest = &bytes[self.byte(group + S::GROUPS - 1)..][..(S::GROUPS - 2) * Self::STEP + Self::SPAN];
        for g in 1..S::GROUPS {
            let low = &rest[(S::GROUPS - 1 - g) * Self::STEP..];
            weights[g] = self.weights(s, [low, &low[Self::SPAN - 8..]], scale);
        }
        weights
    }

    /// The weights of the first `groups` of the tile's groups, wherever they are.
    #[inline(always)]
    fn tile_at_seam(
        &self,
        s: S,
        rings: [&[u32]; ROWS],
        scales: &[S::V; ROWS],
        group: usize,
        groups: usize,
    ) -> Tile<S> {
        let mut tile = [[s.splat(0.0); MAX_GROUPS]; ROWS];
        for r in 0..ROWS {
            for g in 0..groups {
                let window = ring_window(rings[r], self.byte(group + g));
                tile[r][g] = F::weight(s, s.group::<K>(&self.code, window), scales[r]);
            }
        }
        tile
    }

    /// Gives `products` the tiles of one block of `ROWS` rows.
    #[inline(always)]
    fn block(&self, s: S, rings: [&[u32]; ROWS], scales: &[S::V; ROWS], products: &mut impl Products<S>) {
        // The block's first group, which wraps. Opaque, so that it is loaded like all others: a broadcast from
        // memory is free, one from a general register is not.
        let seam = |r: usize| ring_window(rings[r], self.byte(0));
        let seams = [seam(0), seam(1), seam(2), seam(3)].map(|window| window.map(u64::to_le_bytes));
        let seams = black_box(&seams);

        let mut group = 0;
        while group + S::GROUPS <= self.groups {
            if self.is_inside(group.max(1), rings[0]) {
                let tile = [
                    self.row(s, &seams[0], rings[0], scales[0], group),
                    self.row(s, &seams[1], rings[1], scales[1], group),
                    self.row(s, &seams[2], rings[2], scales[2], group),
                    self.row(s, &seams[3], rings[3], scales[3], group),
                ];
                products.add(s, &tile, group, S::GROUPS);
            } else {
                let tile = self.tile_at_seam(s, rings, scales, group, S::GROUPS);
                products.add(s, &tile, group, S::GROUPS);
            }
            group += S::GROUPS;
        }
        if group < self.groups {
            let tile = self.tile_at_seam(s, rings, scales, group, self.groups - group);
            products.add(s, &tile, group, self.groups - group);
        }
    }
}

/// What the tiles of a block are added to.
trait Products<S: Lanes> {
    /// Adds the first `groups` groups of a tile that starts at `group`, times x.
    fn add(&mut self, s: S, tile: &Tile<S>, group: usize, groups: usize);
}

/// Block `block` of `ROWS` rows from `row`; past the last of `rows` rows that one again.
#[inline(always)]
fn rings<'a>(job: &'a Job<'_>, row: usize, rows: usize, block: usize) -> [&'a [u32]; ROWS] {
    let ring = |r: usize| job.ring(row + r.min(rows - 1), block);
    [ring(0), ring(1), ring(2), ring(3)]
}

#[inline(always)]
fn scales<S: Lanes>(s: S, job: &Job<'_>, row: usize, rows: usize) -> [S::V; ROWS] {
    let mut scales = [s.splat(0.0); ROWS];
    for r in 0..ROWS {
        scales[r] = s.splat(job.scales[row + r.min(rows - 1)]);
    }
    scales
}

/// Calls a function of `<S, F, K>` with `K` the matrix's `k`.
macro_rules! with_bits {
    ($function:ident::<$s:ty, $f:ty>($bits:expr, $($argument:expr),*)) => {
        match $bits {
            1 => $function::<$s, $f, 1>($($argument),*),
            2 => $function::<$s, $f, 2>($($argument),*),
            3 => $function::<$s, $f, 3>($($argument),*),
            _ => $function::<$s, $f, 4>($($argument),*),
        }
    };
}

struct Output<'a, F>(OutputTask<'a>, PhantomData<F>);

impl<F: Form> Kernel for Output<'_, F> {
    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        with_bits!(output_panel::<S, F>(self.0.job.matrix.geometry().bits(), s, self.0));
    }
}

#[inline(always)]
fn output_panel<S: Lanes, F: Form, const K: u32>(s: S, task: OutputTask<'_>) {
    let OutputTask { job, rows, blocks, sums } = task;
    let geometry = job.matrix.geometry();
    let decoder = Decoder::<S, F, K>::new(s, geometry);
    let width = blocks.len() * geometry.block();
    for row in rows.clone().step_by(ROWS) {
        let tile_rows = ROWS.min(rows.end - row);
        let scales = scales(s, &job, row, tile_rows);
        for (i, block) in blocks.clone().enumerate() {
            let rings = rings(&job, row, tile_rows, block);
            // A row's codes are too short a run for the hardware to see ahead to the next rows.
            if row + ROWS < rows.end {
                for r in 0..ROWS.min(rows.end - row - ROWS) {
                    let ring = job.ring(row + ROWS + r, block);
                    s.prefetch(ring);
                    s.prefetch(&ring[ring.len() / 2..]);
                }
            }
            let col = i * geometry.block();
            if tile_rows == ROWS {
                let mut products = OutputProducts::<true> { job: &job, row, rows: ROWS, col, width, sums };
                decoder.block(s, rings, &scales, &mut products);
            } else {
                let rows = tile_rows;
                let mut products = OutputProducts::<false> { job: &job, row, rows, col, width, sums };
                decoder.block(s, rings, &scales, &mut products);
            }
        }
    }
}

/// Where a block's products go; `FULL` if all `ROWS` rows of the tile are of the matrix.
struct OutputProducts<'a, const FULL: bool> {
    job: &'a Job<'a>,
    /// The tile's first row, and how many of its rows are the matrix's.
    row: usize,
    rows: usize,
    /// The block's first column in `sums [m, width]`.
    col: usize,
    width: usize,
    sums: &'a mut [f32],
}

impl<S: Lanes, const FULL: bool> Products<S> for OutputProducts<'_, FULL> {
    #[inline(always)]
    fn add(&mut self, s: S, tile: &Tile<S>, group: usize, groups: usize) {
        let rows = if FULL { ROWS } else { self.rows };
        let inputs = self.job.matrix.geometry().rows();
        let at = self.col + group * S::LANES;
        for m in 0..self.job.m {
            let x = &self.job.x[m * inputs + self.row..][..rows];
            let sums = &mut self.sums[m * self.width + at..][..groups * S::LANES];
            let mut totals = [s.splat(0.0); MAX_GROUPS];
            for g in 0..groups {
                totals[g] = s.load(&sums[g * S::LANES..]);
            }
            for r in 0..rows {
                let x = s.splat(x[r]);
                for g in 0..groups {
                    totals[g] = s.fma(tile[r][g], x, totals[g]);
                }
            }
            for g in 0..groups {
                s.store(totals[g], &mut sums[g * S::LANES..]);
            }
        }
    }
}

struct Input<'a, F>(InputTask<'a>, PhantomData<F>);

impl<F: Form> Kernel for Input<'_, F> {
    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        with_bits!(input_rows::<S, F>(self.0.job.matrix.geometry().bits(), s, self.0));
    }
}

#[inline(always)]
fn input_rows<S: Lanes, F: Form, const K: u32>(s: S, task: InputTask<'_>) {
    let InputTask { job, rows, sums } = task;
    let geometry = job.matrix.geometry();
    let decoder = Decoder::<S, F, K>::new(s, geometry);
    // One vector of sums for each row of x and stored row of the tile.
    let mut totals = vec![[s.splat(0.0); ROWS]; job.m];
    for (row, sums) in rows.step_by(ROWS).zip(sums.chunks_mut(ROWS * job.m)) {
        let tile_rows = sums.len() / job.m;
        let scales = scales(s, &job, row, tile_rows);
        totals.fill([s.splat(0.0); ROWS]);
        for block in 0..geometry.blocks_per_row() {
            let rings = rings(&job, row, tile_rows, block);
            let mut products =
                InputProducts { job: &job, col: block * geometry.block(), totals: &mut totals };
            decoder.block(s, rings, &scales, &mut products);
        }
        for (r, sums) in sums.chunks_exact_mut(job.m).enumerate() {
            for (sum, totals) in sums.iter_mut().zip(&totals) {
                *sum = horizontal(s, totals[r]);
            }
        }
    }
}

/// Where a block's products go: a vector of sums for each row of x and of the tile.
struct InputProducts<'a, V> {
    job: &'a Job<'a>,
    /// The block's first column.
    col: usize,
    totals: &'a mut [[V; ROWS]],
}

impl<S: Lanes> Products<S> for InputProducts<'_, S::V> {
    #[inline(always)]
    fn add(&mut self, s: S, tile: &Tile<S>, group: usize, groups: usize) {
        let inputs = self.job.matrix.geometry().cols();
        let col = self.col + group * S::LANES;
        for (m, totals) in self.totals.iter_mut().enumerate() {
            let x = &self.job.x[m * inputs + col..][..groups * S::LANES];
            let mut sums = *totals;
            for g in 0..groups {
                let x = s.load(&x[g * S::LANES..]);
                for r in 0..ROWS {
                    sums[r] = s.fma(tile[r][g], x, sums[r]);
                }
            }
            *totals = sums;
        }
    }
}

/// The sum of the lanes, as a tree.
#[inline(always)]
fn horizontal<S: Lanes>(s: S, v: S::V) -> f32 {
    let mut lanes = [0f32; MAX_LANES];
    s.store(v, &mut lanes);
    let mut n = S::LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
    }
    lanes[0]
}

struct Decode<'a, F, E> {
    job: Job<'a>,
    row: usize,
    out: &'a mut [E],
    form: PhantomData<F>,
}

impl<F: Form, E: Slot> Kernel for Decode<'_, F, E> {
    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        with_bits!(decode_rows::<S, F>(self.job.matrix.geometry().bits(), s, self));
    }
}

#[inline(always)]
fn decode_rows<S: Lanes, F: Form, const K: u32>(s: S, task: Decode<'_, F, impl Slot>) {
    let Decode { job, row, out, .. } = task;
    let geometry = job.matrix.geometry();
    let decoder = Decoder::<S, F, K>::new(s, geometry);
    for (i, out) in out.chunks_exact_mut(geometry.block()).enumerate() {
        let row = row + i / geometry.blocks_per_row();
        let ring = job.ring(row, i % geometry.blocks_per_row());
        let scale = s.splat(job.scales[row]);
        for (group, out) in out.chunks_exact_mut(S::LANES).enumerate() {
            let y = s.group::<K>(&decoder.code, ring_window(ring, decoder.byte(group)));
            Slot::store(s, F::weight(s, y, scale), out);
        }
    }
}

/// A type that weights can be stored as.
trait Slot: Sized {
    fn store<S: Lanes>(s: S, v: S::V, to: &mut [Self]);
}

impl Slot for f32 {
    #[inline(always)]
    fn store<S: Lanes>(s: S, v: S::V, to: &mut [f32]) {
        s.store(v, to);
    }
}

impl Slot for f16 {
    #[inline(always)]
    fn store<S: Lanes>(s: S, v: S::V, to: &mut [f16]) {
        s.store_f16(v, to);
    }
}

impl Slot for bf16 {
    #[inline(always)]
    fn store<S: Lanes>(s: S, v: S::V, to: &mut [bf16]) {
        s.store_bf16(v, to);
    }
}
