//! The plain level: what the others must equal, one weight at a time.

use half::{bf16, f16};
use trellis_codec::{codebook, pack};

use crate::element::Slots;
use crate::task::{DecodeTask, InputTask, Job, OutputTask, Weights};

/// Calls `each(t, weight)` for the weights of one block, in order.
fn for_each_weight(job: &Job<'_>, row: usize, block: usize, mut each: impl FnMut(usize, f32)) {
    let g = &job.matrix.geometry;
    let (ring, scale) = (job.ring(row, block), job.scales[row]);
    for t in 0..g.block() {
        let y = codebook::y(pack::window(ring, g.window_offset(t), g.state_bits()));
        let weight = match job.weights {
            Weights::Packed => codebook::unrefined(y) * scale,
            Weights::Factored => y as f32,
            Weights::Expanded(dtype) => dtype.round(codebook::exact(y) * scale),
        };
        each(t, weight);
    }
}

pub(crate) fn output(task: OutputTask<'_>) {
    let OutputTask { job, rows, blocks, sums } = task;
    let g = &job.matrix.geometry;
    let width = blocks.len() * g.block();
    for row in rows {
        for (i, block) in blocks.clone().enumerate() {
            for_each_weight(&job, row, block, |t, weight| {
                for m in 0..job.m {
                    let sum = &mut sums[m * width + i * g.block() + t];
                    *sum = weight.mul_add(job.x[m * g.rows() + row], *sum);
                }
            });
        }
    }
}

pub(crate) fn input(task: InputTask<'_>) {
    let InputTask { job, rows, sums } = task;
    let g = &job.matrix.geometry;
    for (row, sums) in rows.zip(sums.chunks_exact_mut(job.m)) {
        sums.fill(0.0);
        for block in 0..g.blocks_per_row() {
            for_each_weight(&job, row, block, |t, weight| {
                for (m, sum) in sums.iter_mut().enumerate() {
                    *sum = weight.mul_add(job.x[m * g.cols() + block * g.block() + t], *sum);
                }
            });
        }
    }
}

pub(crate) fn decode(task: DecodeTask<'_>) {
    let DecodeTask { job, rows, mut out } = task;
    let g = &job.matrix.geometry;
    for (i, row) in rows.enumerate() {
        for block in 0..g.blocks_per_row() {
            let at = i * g.cols() + block * g.block();
            for_each_weight(&job, row, block, |t, weight| match &mut out {
                Slots::F32(out) => out[at + t] = weight,
                Slots::F16(out) => out[at + t] = f16::from_f32(weight),
                Slots::Bf16(out) => out[at + t] = bf16::from_f32(weight),
            });
        }
    }
}
