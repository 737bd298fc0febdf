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
use std::mem::MaybeUninit;
use std::ops::Range;

/// The input of a convolution: as it is, or normed and activated on the way.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// [B, C, F, H, W]
    pub values: &'a [f32],
    /// sqrt(C) gamma `[C]` of a norm followed by SiLU.
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

/// input [B, C, F, H, W], weight [O, C, kt, kh, kw], bias `[O]`, residual [B, O, F', H', W'] -> [B, O, F', H', W']
pub fn convolve(shape: &ConvShape, input: Input<'_>, weight: &[f32], bias: &[f32], residual: Option<&[f32]>) -> Vec<f32> {
    let sweep = Sweep::forward(shape);
    let kernel = Kernel::new(&sweep, shape, bias, |o, i, tap| weight[(o * shape.inputs + i) * tap.count + tap.at]);
    let [frames, height, width] = sweep.destination;
    let load = |b: usize, t: usize, activated: &mut Vec<f32>, packed: &mut [f32]| {
        input.pack(&sweep, b, t, activated, packed);
    };
    let finish = |band: Band<'_, '_>, _: &mut Vec<f32>| {
        let Band { sums, rows, .. } = band;
        for (c, out) in band.planes.iter_mut().enumerate() {
            let out = out[rows.start * width..rows.end * width].chunks_exact_mut(width);
            let start = ((band.clip * shape.outputs + c) * frames + band.frame) * height * width;
            for ((out, sums), y) in out.zip(sums.channel(c)).zip(rows.clone()) {
                let out = out.write_copy_of_slice(sums);
                if let Some(residual) = residual {
                    let residual = &residual[start + y * width..][..width];
                    out.iter_mut().zip(residual).for_each(|(out, residual)| *out += residual);
                }
            }
        }
    };
    run(&sweep, &kernel, shape.output_len(), load, finish).0
}

/// Gradient of the input, and of its gain if it has one.
pub fn input_gradient(shape: &ConvShape, input: Input<'_>, weight: &[f32], gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
    assert!(shape.enlarge == 1 || input.gain.is_none(), "an enlarged input is not activated");
    let sweep = Sweep::transposed(shape);
    let [_, kh, kw] = shape.kernel;
    let mirrored = |tap: Tap| tap.at / (kh * kw) * (kh * kw) + (kh * kw - 1 - tap.at % (kh * kw));
    let value = |i: usize, o: usize, tap: Tap| weight[(o * shape.inputs + i) * tap.count + mirrored(tap)];
    let kernel = Kernel::new(&sweep, shape, &vec![0.0; shape.inputs], value);
    let source = Input { values: gradient, gain: None };
    let load = |b: usize, t: usize, activated: &mut Vec<f32>, packed: &mut [f32]| {
        source.pack(&sweep, b, t, activated, packed);
    };
    let [_, height, width] = shape.size;
    let finish = |band: Band<'_, '_>, compact: &mut Vec<f32>| {
        let rows = band.rows.start / shape.enlarge..band.rows.end / shape.enlarge;
        let positions = rows.len() * width;
        compact.resize(shape.inputs * positions, 0.0);
        for (c, compact) in compact.chunks_exact_mut(positions).enumerate() {
            band.sums.shrink_channel(c, shape.enlarge, compact);
        }
        let mut gain_gradient = Vec::new();
        if let Some(gain) = input.gain {
            gain_gradient.resize(shape.inputs, 0.0);
            let stride = shape.size[0] * height * width;
            let start = band.clip * shape.inputs * stride + (band.frame * height + rows.start) * width;
            let x = &input.values[start..];
            let (gradient, gain_gradient) = (&mut compact[..], &mut gain_gradient[..]);
            Arch::new().dispatch(NormSiluGradient { x, stride, gain, gradient, gain_gradient });
        }
        for (out, compact) in band.planes.iter_mut().zip(compact.chunks_exact(positions)) {
            out[rows.start * width..rows.end * width].write_copy_of_slice(compact);
        }
        gain_gradient
    };
    let (out, parts) = run(&sweep, &kernel, shape.input_len(), load, finish);
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
    rows: Range<usize>,
    sums: Sums<'a>,
    /// Where the frame goes: a plane per channel.
    planes: &'a mut [&'b mut [MaybeUninit<f32>]],
}

/// Sums of the taps [O, stride], with the meaningless positions between rows.
#[derive(Clone, Copy)]
struct Sums<'a> {
    values: &'a [f32],
    stride: usize,
    pitch: usize,
    width: usize,
}

impl<'a> Sums<'a> {
    /// The rows of a channel; more rows than were computed.
    fn channel(self, channel: usize) -> impl Iterator<Item = &'a [f32]> {
        let values = &self.values[channel * self.stride..][..self.stride];
        values.chunks(self.pitch).map(move |row| &row[..self.width])
    }

    /// Sums squares of `factor` x `factor` positions into `out` [H, W]: the gradient of an enlargement.
    fn shrink_channel(self, channel: usize, factor: usize, out: &mut [f32]) {
        let width = self.width / factor;
        let mut rows = self.channel(channel);
        for out in out.chunks_exact_mut(width) {
            for (i, row) in rows.by_ref().take(factor).enumerate() {
                match (i, factor) {
                    (0, 1) => out.copy_from_slice(row),
                    (0, _) => out.iter_mut().zip(row.chunks_exact(factor)).for_each(|(out, x)| *out = x.iter().sum()),
                    _ => out.iter_mut().zip(row.chunks_exact(factor)).for_each(|(out, x)| *out += x.iter().sum::<f32>()),
                }
            }
        }
    }
}

/// Positions of a band: its sums should stay in the second-level cache.
const BAND: usize = 4608;

/// Applies `load` to the frames that are needed, sums the taps, and applies `finish`, which writes its band of all planes,
/// to the results. Returns the `len` values of the destination, and what `finish` returned, in order.
fn run<R: Send>(
    sweep: &Sweep,
    kernel: &Kernel,
    len: usize,
    load: impl Fn(usize, usize, &mut Vec<f32>, &mut [f32]) + Sync,
    finish: impl for<'a, 'b> Fn(Band<'a, 'b>, &mut Vec<f32>) -> R + Sync,
) -> (Vec<f32>, Vec<R>) {
    let mut out = Box::new_uninit_slice(len);
    let buffers = || (Scratch::new(sweep, kernel), Vec::new());
    let parts = divide(sweep, &mut out).into_par_iter().map_init(buffers, |(scratch, compact), (clip, frames)| {
        let mut results = Vec::new();
        for (frame, mut planes) in frames {
            for (_, from) in &sweep.frames[frame] {
                scratch.load((clip, *from), |activated, packed| load(clip, *from, activated, packed));
            }
            for rows in bands(sweep) {
                let sums = scratch.sum_taps(sweep, kernel, frame, rows.clone());
                let band = Band { clip, frame, rows, sums, planes: &mut planes };
                results.push(finish(band, compact));
            }
        }
        results
    });
    let results = parts.collect::<Vec<_>>().into_iter().flatten().collect();
    // SAFETY: the pieces of work cover all clips, frames and rows, and `finish` writes all channels of its rows.
    (unsafe { out.assume_init() }.into_vec(), results)
}

/// Even numbers of rows that have about [`BAND`] positions.
fn bands(sweep: &Sweep) -> impl Iterator<Item = Range<usize>> + use<> {
    let height = sweep.destination[1];
    let rows = rows_per_band(sweep);
    (0..height).step_by(rows).map(move |first| first..(first + rows).min(height))
}

fn rows_per_band(sweep: &Sweep) -> usize {
    (BAND / sweep.grid.pitch).next_multiple_of(2).clamp(2, sweep.destination[1].max(2))
}

/// A packed frame and which one it is: (clip, frame).
type Held = (Option<(usize, usize)>, Vec<f32>);

/// The buffers of a thread.
struct Scratch {
    /// Packed frames of the source that are in reach of the kernel: ((clip, frame), values).
    ring: Vec<Held>,
    activated: Vec<f32>,
    sums: Vec<f32>,
    stride: usize,
}

impl Scratch {
    fn new(sweep: &Sweep, kernel: &Kernel) -> Self {
        let slot = || (None, vec![0.0; sweep.packed_len(OVERRUN)]);
        let stride = rows_per_band(sweep) * sweep.grid.pitch + OVERRUN;
        Self {
            ring: kernel.slices.iter().map(|_| slot()).collect(),
            activated: Vec::new(),
            sums: vec![0.0; kernel.bias.len() * stride],
            stride,
        }
    }

    fn load(&mut self, frame: (usize, usize), pack: impl FnOnce(&mut Vec<f32>, &mut [f32])) {
        let slot = frame.1 % self.ring.len();
        let (held, packed) = &mut self.ring[slot];
        if *held != Some(frame) {
            pack(&mut self.activated, packed);
            *held = Some(frame);
        }
    }

    fn sum_taps(&mut self, sweep: &Sweep, kernel: &Kernel, frame: usize, rows: Range<usize>) -> Sums<'_> {
        let (pitch, width) = (sweep.grid.pitch, sweep.destination[2]);
        let slice = |(k, from): &(usize, usize)| {
            let packed = &self.ring[from % self.ring.len()].1;
            (&packed[rows.start * pitch..], &kernel.slices[*k][..])
        };
        let runs: Vec<_> = sweep.frames[frame].iter().map(slice).collect();
        let positions = (rows.len() - 1) * pitch + width;
        let (taps, bias, block) = (&sweep.taps[..], &kernel.bias[..], kernel.block);
        let (out, stride) = (&mut self.sums[..], self.stride);
        Arch::new().dispatch(SumTaps { runs: &runs, taps, bias, block, positions, out, stride });
        Sums { values: &self.sums, stride, pitch, width }
    }
}

/// A frame of the destination with its planes, one per channel.
type Planes<'a> = (usize, Vec<&'a mut [MaybeUninit<f32>]>);

/// Divides the destination [B, O, F, H, W] into pieces of work: (clip, consecutive frames).
fn divide<'a>(sweep: &Sweep, out: &'a mut [MaybeUninit<f32>]) -> Vec<(usize, Vec<Planes<'a>>)> {
    let (frames, channels) = (sweep.destination[0], sweep.channels[1]);
    let pieces = (2 * rayon::current_num_threads()).div_ceil(sweep.batch).min(frames);
    let (length, area) = (frames.div_ceil(pieces), out.len() / (sweep.batch * channels * frames));
    let mut work = Vec::new();
    for (clip, out) in out.chunks_exact_mut(channels * frames * area).enumerate() {
        let mut by_frame: Vec<Planes<'a>> = (0..frames).map(|t| (t, Vec::with_capacity(channels))).collect();
        for (i, plane) in out.chunks_exact_mut(area).enumerate() {
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
