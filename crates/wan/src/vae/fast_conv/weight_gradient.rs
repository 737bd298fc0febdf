//! Gradient of the weight: each tap's shifted input times the gradient of the output.
//!
//! The work is divided by the shapes alone, and the parts are added in order, so that the result is the same for any
//! number of threads.

use super::kernel::{Correlate, GRADIENT_BLOCK, OVERRUN};
use super::shape::{ConvShape, Sweep};
use super::sweep::{Input, sum_in_order};
use pulp::Arch;
use rayon::prelude::*;

/// Elements of packed input and gradient that are worked on together: they should stay in the second-level cache.
const WORKING_SET: usize = 1 << 18;

/// Positions correlated in one go: four channels of them should stay in the first-level cache.
const STRETCH: usize = 1536;

/// Widest vector, in elements; the gradient's planes are whole vectors.
const VECTOR: usize = 16;

/// Elements of all partial results.
const MAX_PARTIAL: usize = 1 << 22;

/// input [B, C, F, H, W], gradient [B, O, F', H', W'] -> gradients of weight [O, C, kt, kh, kw] and bias `[O]`
pub fn weight_gradient(shape: &ConvShape, input: Input<'_>, gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let sweep = Sweep::forward(shape);
    let units = divide(shape, &sweep);
    let parts = (MAX_PARTIAL / shape.weight_len()).clamp(4, 64);
    let partial: Vec<_> = units
        .par_chunks(units.len().div_ceil(parts))
        .map(|units| {
            let mut part = Partial::new(shape, &sweep);
            units.iter().for_each(|(clip, frames)| part.add(input, gradient, *clip, frames.clone()));
            (part.weight, part.bias)
        })
        .collect();
    let weight = sum_in_order(partial.iter().map(|(weight, _)| weight.as_slice()));
    let bias = sum_in_order(partial.iter().map(|(_, bias)| bias.as_slice()));
    (reorder(shape, &weight), bias[..shape.outputs].to_vec())
}

/// Stretches of output frames that are processed together: (clip, frames).
fn divide(shape: &ConvShape, sweep: &Sweep) -> Vec<(usize, std::ops::Range<usize>)> {
    let per_frame = shape.inputs * sweep.grid.plane + shape.outputs * sweep.positions();
    let frames = sweep.destination[0];
    let pieces = frames.div_ceil((WORKING_SET / per_frame).max(1));
    let length = frames.div_ceil(pieces);
    let stretches = |clip| (0..frames).step_by(length).map(move |t| (clip, t..(t + length).min(frames)));
    (0..shape.batch).flat_map(stretches).collect()
}

/// [kt][O, padded][C, kh, kw] -> [O, C, kt, kh, kw]
fn reorder(shape: &ConvShape, sums: &[f32]) -> Vec<f32> {
    let [kt, kh, kw] = shape.kernel;
    let (area, padded) = (kh * kw, shape.outputs.next_multiple_of(GRADIENT_BLOCK));
    let mut weight = Vec::with_capacity(shape.weight_len());
    for o in 0..shape.outputs {
        for c in 0..shape.inputs {
            for t in 0..kt {
                let start = ((t * padded + o) * shape.inputs + c) * area;
                weight.extend_from_slice(&sums[start..start + area]);
            }
        }
    }
    weight
}

/// The sum over some of the work.
struct Partial<'a> {
    sweep: &'a Sweep,
    shape: &'a ConvShape,
    /// [kt][O, padded][taps]
    weight: Vec<f32>,
    /// `[O]`
    bias: Vec<f32>,
    activated: Vec<f32>,
    source: Vec<f32>,
    gradient: Vec<f32>,
}

impl<'a> Partial<'a> {
    fn new(shape: &'a ConvShape, sweep: &'a Sweep) -> Self {
        let padded = shape.outputs.next_multiple_of(GRADIENT_BLOCK);
        let weight = vec![0.0; shape.kernel[0] * padded * sweep.taps.len()];
        let (activated, source, gradient) = (Vec::new(), Vec::new(), Vec::new());
        Self { sweep, shape, weight, bias: vec![0.0; shape.outputs], activated, source, gradient }
    }

    fn add(&mut self, input: Input<'_>, gradient: &[f32], clip: usize, frames: std::ops::Range<usize>) {
        let sweep = self.sweep;
        let sources = frames.clone().flat_map(|t| sweep.frames[t].iter().map(|(_, from)| *from));
        let Some(first) = sources.clone().min() else { return };
        let last = sources.max().unwrap_or(first);
        let (packed, plane) = (sweep.packed_len(OVERRUN), self.plane());
        self.source.resize((last + 1 - first) * packed, 0.0);
        for (t, slot) in (first..=last).zip(self.source.chunks_exact_mut(packed)) {
            input.pack(sweep, clip, t, &mut self.activated, slot);
        }
        self.pack_gradient(gradient, clip, frames.clone());
        for group in groups(frames.len(), plane) {
            for k in 0..self.shape.kernel[0] {
                let run = |(frame, start, len): &(usize, usize, usize)| {
                    let (_, from) = sweep.frames[frames.start + frame].iter().find(|(slice, _)| *slice == k)?;
                    Some((frame * plane + start, (from - first) * packed + start, *len))
                };
                let runs: Vec<_> = group.iter().filter_map(run).collect();
                self.correlate(k, frames.len() * plane, &runs);
            }
        }
    }

    fn correlate(&mut self, k: usize, gradient_stride: usize, runs: &[(usize, usize, usize)]) {
        let len = self.weight.len() / self.shape.kernel[0];
        let sums = &mut self.weight[k * len..][..len];
        let (gradient, source, taps) = (&self.gradient[..], &self.source[..], &self.sweep.taps[..]);
        Arch::new().dispatch(Correlate { runs, gradient, gradient_stride, source, taps, sums });
    }

    /// Elements of a frame's gradient plane: the positions, in whole vectors.
    fn plane(&self) -> usize {
        self.sweep.positions().next_multiple_of(VECTOR)
    }

    /// gradient [B, O, F', H', W'] -> [O, padded][frames][plane], zero at meaningless positions. Adds up the bias.
    fn pack_gradient(&mut self, gradient: &[f32], clip: usize, frames: std::ops::Range<usize>) {
        let [total, height, width] = self.sweep.destination;
        let (plane, pitch, area) = (self.plane(), self.sweep.grid.pitch, height * width);
        let padded = self.shape.outputs.next_multiple_of(GRADIENT_BLOCK);
        let len = padded * frames.len() * plane;
        if self.gradient.len() != len {
            self.gradient.clear(); // what lies between the rows differs
            self.gradient.resize(len, 0.0);
        }
        for o in 0..self.shape.outputs {
            for (i, t) in frames.clone().enumerate() {
                let from = &gradient[((clip * self.shape.outputs + o) * total + t) * area..][..area];
                let to = &mut self.gradient[(o * frames.len() + i) * plane..];
                for (y, row) in from.chunks_exact(width).enumerate() {
                    to[y * pitch..][..width].copy_from_slice(row);
                }
                self.bias[o] += sum(from);
            }
        }
    }
}

/// A sum in sixteen lanes, which the processor adds side by side.
fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let chunks = values.chunks_exact(16);
    let rest: f32 = chunks.remainder().iter().sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().sum::<f32>() + rest
}

/// Divides the planes of `frames` frames into groups of about [`STRETCH`] positions: (frame, start, positions).
fn groups(frames: usize, plane: usize) -> Vec<Vec<(usize, usize, usize)>> {
    if plane <= STRETCH {
        let together = (STRETCH / plane).max(1);
        let starts = (0..frames).step_by(together);
        return starts.map(|f| (f..(f + together).min(frames)).map(|f| (f, 0, plane)).collect()).collect();
    }
    let length = plane.div_ceil(plane.div_ceil(STRETCH)).next_multiple_of(VECTOR);
    let pieces = |f| (0..plane).step_by(length).map(move |start| vec![(f, start, length.min(plane - start))]);
    (0..frames).flat_map(pieces).collect()
}
