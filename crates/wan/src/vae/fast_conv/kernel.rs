//! The inner loops, in vectors of whatever width the processor has.

use pulp::{Simd, WithSimd};

/// Elements that the kernels may read past the end of a packed frame: the largest block of positions.
pub const OVERRUN: usize = 6 * 16;

/// Output channels that one call computes together; weights are stored in blocks of this.
pub fn channel_block(channels: usize) -> usize {
    struct Registers;
    impl WithSimd for Registers {
        type Output = usize;
        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::REGISTER_COUNT
        }
    }
    if channels > 4 && pulp::Arch::new().dispatch(Registers) >= 32 { 8 } else { 4 }
}

/// Sums the taps of one frame of the destination.
pub struct SumTaps<'a> {
    /// Packed source frames, each with its slice of the kernel [channel blocks][taps][block].
    pub runs: &'a [(&'a [f32], &'a [f32])],
    /// Offsets within a packed frame.
    pub taps: &'a [usize],
    /// Start values per channel, whole blocks.
    pub bias: &'a [f32],
    /// Channels of a block: 4 or 8.
    pub block: usize,
    /// Positions to compute.
    pub positions: usize,
    /// [channels][stride], where stride leaves room for a block of positions.
    pub out: &'a mut [f32],
    /// Elements from channel to channel of `out`.
    pub stride: usize,
}

impl WithSimd for SumTaps<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match (self.block, S::REGISTER_COUNT >= 32) {
            (8, _) => self.run::<S, 3, 8>(simd),
            (_, true) => self.run::<S, 6, 4>(simd),
            (_, false) => self.run::<S, 3, 4>(simd),
        }
    }
}

impl SumTaps<'_> {
    #[inline(always)]
    fn run<S: Simd, const V: usize, const C: usize>(self, simd: S) {
        let step = V * S::F32_LANES;
        let blocks = self.bias.len() / C;
        let per_block = self.taps.len() * C;
        for start in (0..self.positions).step_by(step) {
            for block in 0..blocks {
                let mut sums = [[simd.splat_f32s(0.0); V]; C];
                for (sum, bias) in sums.iter_mut().zip(&self.bias[block * C..]) {
                    *sum = [simd.splat_f32s(*bias); V];
                }
                for (frame, weights) in self.runs {
                    let weights = &weights[block * per_block..][..per_block];
                    sum_taps(simd, &frame[start..], self.taps, weights, &mut sums);
                }
                for (c, sum) in sums.iter().enumerate() {
                    let out = &mut self.out[(block * C + c) * self.stride + start..][..step];
                    for (v, sum) in sum.iter().enumerate() {
                        store(simd, *sum, &mut out[v * S::F32_LANES..]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn sum_taps<S: Simd, const V: usize, const C: usize>(
    simd: S,
    frame: &[f32],
    taps: &[usize],
    weights: &[f32],
    sums: &mut [[S::f32s; V]; C],
) {
    let mut local = *sums;
    for (tap, weights) in taps.iter().zip(weights.chunks_exact(C)) {
        let row = &frame[*tap..][..V * S::F32_LANES];
        let mut x = [simd.splat_f32s(0.0); V];
        for v in 0..V {
            x[v] = load(simd, &row[v * S::F32_LANES..]);
        }
        for c in 0..C {
            let weight = simd.splat_f32s(weights[c]);
            for v in 0..V {
                local[c][v] = simd.mul_add_e_f32s(weight, x[v], local[c][v]);
            }
        }
    }
    *sums = local;
}

/// Adds to the gradient of one kernel slice what a group of positions gives.
pub struct Correlate<'a> {
    /// (start in `gradient`, start in `source`, positions): stretches to correlate.
    pub runs: &'a [(usize, usize, usize)],
    /// Output gradients [channels][gradient_stride], zero at meaningless positions.
    pub gradient: &'a [f32],
    /// Elements from channel to channel of `gradient`.
    pub gradient_stride: usize,
    /// Packed source frames.
    pub source: &'a [f32],
    /// Offsets within a packed frame.
    pub taps: &'a [usize],
    /// [channels of `gradient`, in whole blocks of 4][taps]
    pub sums: &'a mut [f32],
}

/// Channels and taps that one call correlates.
const CHANNELS: usize = 4;

/// Channels of a gradient block.
pub const GRADIENT_BLOCK: usize = CHANNELS;

impl WithSimd for Correlate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::REGISTER_COUNT >= 32 { self.run::<S, 6>(simd) } else { self.run::<S, 3>(simd) }
    }
}

impl Correlate<'_> {
    #[inline(always)]
    fn run<S: Simd, const J: usize>(mut self, simd: S) {
        let count = self.taps.len();
        let all = std::mem::take(&mut self.sums);
        for (block, sums) in all.chunks_exact_mut(CHANNELS * count).enumerate() {
            let first = block * CHANNELS * self.gradient_stride;
            for start in (0..count).step_by(J) {
                // A short last group repeats its last tap and drops the result.
                let taps: [usize; J] = std::array::from_fn(|j| self.taps[(start + j).min(count - 1)]);
                let got = self.correlate::<S, J>(simd, first, &taps);
                for c in 0..CHANNELS {
                    for j in 0..J.min(count - start) {
                        sums[c * count + start + j] += simd.reduce_sum_f32s(got[c][j]);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn correlate<S: Simd, const J: usize>(&self, simd: S, first: usize, taps: &[usize; J]) -> [[S::f32s; J]; CHANNELS] {
        let mut sums = [[simd.splat_f32s(0.0); J]; CHANNELS];
        for (gradient_start, source_start, positions) in self.runs {
            let g: [&[f32]; CHANNELS] =
                std::array::from_fn(|c| &self.gradient[first + c * self.gradient_stride + gradient_start..][..*positions]);
            let x: [&[f32]; J] = std::array::from_fn(|j| &self.source[source_start + taps[j]..][..*positions]);
            let mut p = 0;
            while p + S::F32_LANES <= *positions {
                let mut gs = [simd.splat_f32s(0.0); CHANNELS];
                for c in 0..CHANNELS {
                    // SAFETY: `p + F32_LANES <= positions`, the length of the slice.
                    gs[c] = unsafe { load_at(simd, g[c], p) };
                }
                for j in 0..J {
                    // SAFETY: as above.
                    let x = unsafe { load_at(simd, x[j], p) };
                    for c in 0..CHANNELS {
                        sums[c][j] = simd.mul_add_e_f32s(gs[c], x, sums[c][j]);
                    }
                }
                p += S::F32_LANES;
            }
        }
        sums
    }
}

#[inline(always)]
fn load<S: Simd>(simd: S, from: &[f32]) -> S::f32s {
    assert!(from.len() >= S::F32_LANES);
    // SAFETY: just checked.
    unsafe { load_at(simd, from, 0) }
}

/// # Safety
/// `from` has at least `at + F32_LANES` elements.
#[inline(always)]
unsafe fn load_at<S: Simd>(_: S, from: &[f32], at: usize) -> S::f32s {
    debug_assert!(at + S::F32_LANES <= from.len());
    // SAFETY: in bounds by contract; any bits are a valid f32.
    unsafe { from.as_ptr().add(at).cast::<S::f32s>().read_unaligned() }
}

#[inline(always)]
fn store<S: Simd>(_: S, value: S::f32s, to: &mut [f32]) {
    assert!(to.len() >= S::F32_LANES);
    // SAFETY: the slice has at least as many elements as the vector.
    unsafe { to.as_mut_ptr().cast::<S::f32s>().write_unaligned(value) }
}
