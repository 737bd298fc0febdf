//! Convolution and its gradients over a batch of clips, on the CPU threads.
//!
//! Every result is computed by the same operations in the same order for any number of threads.
//!
//! Legend: `B` batch, `C` input channels, `O` output channels, `F` frames, `H` height, `W` width; primes: of the output.

use super::activation::{NormSilu, NormSiluGradient};
use super::kernel::{OVERRUN, SumTaps, channel_block};
use super::shape::{ConvShape, Sweep};
use pulp::Arch;
use rayon::prelude::*;

/// The input of a convolution: as it is, or normed and activated on the way.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// [B, C, F, H, W]
    pub values: &'a [f32],
    /// sqrt(C) gamma [C] of a norm followed by SiLU.
    pub gain: Option<&'a [f32]>,
}

impl Input<'_> {
    /// Copies frame `t` of clip `b` into its padded planes.
    pub fn pack(&self, sweep: &Sweep, b: usize, t: usize, activated: &mut Vec<f32>, packed: &mut [f32]) {
        let [frames, height, width] = sweep.source;
        let (area, channels) = (height * width, sweep.channels[0]);
        let stride = frames * area;
        let x = &self.values[b * channels * stride + t * area..];
        let (x, stride) = match self.gain {
            None => (x, stride),
            Some(gain) => {
                activated.resize(channels * area, 0.0);
                Arch::new().dispatch(NormSilu { x, stride, gain, out: activated });
                (&activated[..], area)
            }
        };
        for (c, plane) in packed.chunks_exact_mut(sweep.grid.plane).take(channels).enumerate() {
            sweep.grid.pack(&x[c * stride..][..area], width, plane);
        }
    }
}

/// input [B, C, F, H, W], weight [O, C, kt, kh, kw], bias [O], residual [B, O, F', H', W'] -> [B, O, F', H', W']
pub fn convolve(
    shape: &ConvShape,
    input: Input<'_>,
    weight: &[f32],
    bias: &[f32],
    residual: Option<&[f32]>,
) -> Vec<f32> {
    let sweep = Sweep::forward(shape);
    let kernel = Kernel::new(&sweep, shape, bias, |o, i, tap| weight[(o * shape.inputs + i) * tap.count + tap.at]);
    let mut out = vec![0.0; shape.output_len()];
    let [frames, height, width] = sweep.destination;
    let load = |b: usize, t: usize, activated: &mut Vec<f32>, packed: &mut [f32]| input.pack(&sweep, b, t, activated, packed);
    let finish = |band: Band<'_, '_>| {
        for (c, out) in band.planes.iter_mut().enumerate() {
            let out = &mut out[band.rows.start * width..band.rows.end * width];
            band.sums.copy_channel(c, out);
            if let Some(residual) = residual {
                let start = ((band.clip * shape.outputs + c) * frames + band.frame) * height * width;
                let residual = &residual[start + band.rows.start * width..];
                out.iter_mut().zip(residual).for_each(|(out, residual)| *out += residual);
            }
        }
    };
    run(&sweep, &kernel, &mut out, load, finish);
    out
}

/// Gradient of the input, and of its gain if it has one.
pub fn input_gradient(shape: &ConvShape, input: Input<'_>, weight: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let sweep = Sweep::transposed(shape);
    let zeros = vec![0.0; shape.inputs];
    let [_, kh, kw] = shape.kernel;
    let mirrored = |tap: Tap| tap.at / (kh * kw) * (kh * kw) + (kh * kw - 1 - tap.at % (kh * kw));
    let value = |i: usize, o: usize, tap: Tap| weight[(o * shape.inputs + i) * tap.count + mirrored(tap)];
    let kernel = Kernel::new(&sweep, shape, &zeros, value);
    let mut out = vec![0.0; shape.input_len()];
    let [frames, height, width] = shape.size;
    let source = Input { values: gradient, gain: None };
    let load = |b: usize, t: usize, activated: &mut Vec<f32>, packed: &mut [f32]| source.pack(&sweep, b, t, activated, packed);
    let finish = |band: Band<'_, '_>| {
        let positions = band.rows.len() * width;
        let mut compact = vec![0.0; shape.inputs * positions];
        for (c, compact) in compact.chunks_exact_mut(positions).enumerate() {
            band.sums.copy_channel(c, compact);
        }
        let mut gain_gradient = Vec::new();
        if let Some(gain) = input.gain {
            gain_gradient.resize(shape.inputs, 0.0);
            let stride = frames * height * width;
            let start = band.clip * shape.inputs * stride + (band.frame * height + band.rows.start) * width;
            let x = &input.values[start..];
            let (gradient, gain_gradient) = (&mut compact[..], &mut gain_gradient[..]);
            Arch::new().dispatch(NormSiluGradient { x, stride, gain, gradient, gain_gradient });
        }
        for (out, compact) in band.planes.iter_mut().zip(compact.chunks_exact(positions)) {
            out[band.rows.start * width..band.rows.end * width].copy_from_slice(compact);
        }
        gain_gradient
    };
    let parts = run(&sweep, &kernel, &mut out, load, finish);
    (out, sum_in_order(parts.iter().map(Vec::as_slice)))
}

/// Element-wise sum; in f64, so that many small parts do not lose digits.
pub fn sum_in_order<'a>(mut parts: impl Iterator<Item = &'a [f32]>) -> Vec<f32> {
    let mut total: Vec<f64> = parts.next().unwrap_or_default().iter().map(|v| f64::from(*v)).collect();
    for part in parts {
        total.iter_mut().zip(part).for_each(|(total, part)| *total += f64::from(*part));
    }
    total.into_iter().map(|v| v as f32).collect()
}

/// A tap of the kernel: `at` of the `count` elements [kt, kh, kw].
#[derive(Clone, Copy)]
struct Tap {
    at: usize,
    count: usize,
}

/// Weights in the order of the inner loop: for each slice of the kernel [channel blocks][taps][block].
struct Kernel {
    slices: Vec<Vec<f32>>,
    bias: Vec<f32>,
    block: usize,
}

impl Kernel {
    /// `value(destination channel, source channel, tap)` is the weight.
    fn new(sweep: &Sweep, shape: &ConvShape, bias: &[f32], value: impl Fn(usize, usize, Tap) -> f32) -> Self {
        let [sources, destinations] = sweep.channels;
        let [kt, kh, kw] = shape.kernel;
        let block = channel_block(destinations);
        let padded = destinations.div_ceil(block) * block;
        let area = kh * kw;
        let slice = |t: usize| {
            let mut weights = Vec::with_capacity(padded * sources * area);
            for first in (0..padded).step_by(block) {
                for source in 0..sources {
                    for at in t * area..(t + 1) * area {
                        let tap = Tap { at, count: kt * area };
                        let of = |d: usize| if d < destinations { value(d, source, tap) } else { 0.0 };
                        weights.extend((first..first + block).map(of));
                    }
                }
            }
            weights
        };
        let mut bias = bias.to_vec();
        bias.resize(padded, 0.0);
        Self { slices: (0..kt).map(slice).collect(), bias, block }
    }
}

/// Rows of a frame of the destination, just computed.
struct Band<'a, 'b> {
    clip: usize,
    frame: usize,
    rows: std::ops::Range<usize>,
    sums: Sums<'a>,
    /// Where the frame goes: a plane per channel.
    planes: &'a mut [&'b mut [f32]],
}

/// Sums of the taps [O, stride], with the meaningless positions between rows.
#[derive(Clone, Copy)]
struct Sums<'a> {
    values: &'a [f32],
    stride: usize,
    pitch: usize,
    width: usize,
}

impl Sums<'_> {
    fn copy_channel(&self, channel: usize, out: &mut [f32]) {
        let sums = &self.values[channel * self.stride..];
        for (y, out) in out.chunks_exact_mut(self.width).enumerate() {
            out.copy_from_slice(&sums[y * self.pitch..][..self.width]);
        }
    }
}

/// Positions of a band: its sums should stay in the second-level cache.
const BAND: usize = 4608;

/// Applies `load` to the frames that are needed, sums the taps, and applies `finish` to the results band by band.
/// Returns what `finish` returned, in order.
fn run<R: Send>(
    sweep: &Sweep,
    kernel: &Kernel,
    out: &mut [f32],
    load: impl Fn(usize, usize, &mut Vec<f32>, &mut [f32]) + Sync,
    finish: impl for<'a, 'b> Fn(Band<'a, 'b>) -> R + Sync,
) -> Vec<R> {
    let parts = divide(sweep, out).into_par_iter().map(|(clip, frames)| {
        let mut ring = Ring::new(sweep, kernel.slices.len());
        let mut results = Vec::new();
        for (t, mut planes) in frames {
            for (_, from) in &sweep.frames[t] {
                ring.load(*from, |activated, packed| load(clip, *from, activated, packed));
            }
            run_frame(sweep, kernel, &ring, t, |rows, sums| {
                results.push(finish(Band { clip, frame: t, rows, sums, planes: &mut planes }));
            });
        }
        results
    });
    parts.collect::<Vec<_>>().into_iter().flatten().collect()
}

fn run_frame(
    sweep: &Sweep,
    kernel: &Kernel,
    ring: &Ring,
    t: usize,
    mut finish: impl FnMut(std::ops::Range<usize>, Sums<'_>),
) {
    let [_, height, width] = sweep.destination;
    let pitch = sweep.grid.pitch;
    let rows_per_band = (BAND / pitch).clamp(1, height);
    let stride = rows_per_band * pitch + OVERRUN;
    let mut sums = vec![0.0; kernel.bias.len() * stride];
    for first in (0..height).step_by(rows_per_band) {
        let rows = first..(first + rows_per_band).min(height);
        let slice = |(k, from): &(usize, usize)| (&ring.frame(*from)[first * pitch..], &kernel.slices[*k][..]);
        let runs: Vec<_> = sweep.frames[t].iter().map(slice).collect();
        let positions = (rows.len() - 1) * pitch + width;
        let (taps, bias, block) = (&sweep.taps[..], &kernel.bias[..], kernel.block);
        Arch::new().dispatch(SumTaps { runs: &runs, taps, bias, block, positions, out: &mut sums, stride });
        finish(rows, Sums { values: &sums, stride, pitch, width });
    }
}

/// The packed frames of the source that are in reach of the kernel.
struct Ring {
    slots: Vec<(Option<usize>, Vec<f32>)>,
    activated: Vec<f32>,
}

impl Ring {
    fn new(sweep: &Sweep, slots: usize) -> Self {
        let slot = || (None, vec![0.0; sweep.packed_len(OVERRUN)]);
        Self { slots: (0..slots).map(|_| slot()).collect(), activated: Vec::new() }
    }

    fn load(&mut self, frame: usize, pack: impl FnOnce(&mut Vec<f32>, &mut [f32])) {
        let count = self.slots.len();
        let (held, packed) = &mut self.slots[frame % count];
        if *held != Some(frame) {
            pack(&mut self.activated, packed);
            *held = Some(frame);
        }
    }

    fn frame(&self, frame: usize) -> &[f32] {
        &self.slots[frame % self.slots.len()].1
    }
}

/// A frame of the destination with its planes, one per channel.
type Planes<'a> = (usize, Vec<&'a mut [f32]>);

/// Divides the destination [B, O, F, H, W] into pieces of work: (clip, consecutive frames).
fn divide<'a>(sweep: &Sweep, out: &'a mut [f32]) -> Vec<(usize, Vec<Planes<'a>>)> {
    let [frames, height, width] = sweep.destination;
    let channels = sweep.channels[1];
    let pieces = (2 * rayon::current_num_threads()).div_ceil(sweep.batch).min(frames);
    let length = frames.div_ceil(pieces);
    let mut work = Vec::new();
    for (clip, out) in out.chunks_exact_mut(channels * frames * height * width).enumerate() {
        let mut by_frame: Vec<Planes<'a>> = (0..frames).map(|t| (t, Vec::with_capacity(channels))).collect();
        for (i, plane) in out.chunks_exact_mut(height * width).enumerate() {
            by_frame[i % frames].1.push(plane);
        }
        while by_frame.len() > length {
            let rest = by_frame.split_off(length);
            work.push((clip, std::mem::replace(&mut by_frame, rest)));
        }
        work.push((clip, by_frame));
    }
    work
}
