//! Norm over the channels followed by SiLU, and its gradient, for a stretch of positions at a time.
//!
//! ```text
//! u_c = x_c / max(||x||, 1e-12) * gain_c,   gain_c = sqrt(C) gamma_c
//! a_c = u_c sigmoid(u_c)
//! ```

use crate::ops::rows::sigmoid;
use pulp::{Simd, WithSimd};

/// Positions that are worked on together: their values stay in the first-level cache.
const STRETCH: usize = 256;

/// Lengths below this are taken as this.
const EPSILON: f32 = 1e-12;

/// x -> a, for one frame.
pub struct NormSilu<'a> {
    /// Input: channel `c` begins at `c * stride`.
    pub x: &'a [f32],
    /// Elements from channel to channel of `x`.
    pub stride: usize,
    /// sqrt(C) gamma `[C]`
    pub gain: &'a [f32],
    /// Result [C, positions]
    pub out: &'a mut [f32],
}

impl WithSimd for NormSilu<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let positions = self.out.len() / self.gain.len();
        for start in (0..positions).step_by(STRETCH) {
            let len = STRETCH.min(positions - start);
            let inverse = inverse_lengths(self.x, self.stride, self.gain.len(), start, len);
            for (c, gain) in self.gain.iter().enumerate() {
                let x = &self.x[c * self.stride + start..][..len];
                let out = &mut self.out[c * positions + start..][..len];
                for ((out, x), inverse) in out.iter_mut().zip(x).zip(&inverse[..len]) {
                    let u = x * inverse * gain;
                    *out = u * sigmoid(u);
                }
            }
        }
    }
}

/// Gradient of a -> gradient of x, in place, for one frame or a band of it.
///
/// ```text
/// du_c = da_c silu'(u_c)
/// dgain_c = sum du_c x_c / ||x||
/// dx_c = gain_c du_c / ||x|| - x_c (sum_j gain_j du_j x_j) / ||x||^3
/// ```
pub struct NormSiluGradient<'a> {
    /// Input: channel `c` begins at `c * stride`.
    pub x: &'a [f32],
    /// Elements from channel to channel of `x`.
    pub stride: usize,
    /// sqrt(C) gamma `[C]`
    pub gain: &'a [f32],
    /// da, becomes dx. [C, positions]
    pub gradient: &'a mut [f32],
    /// The sum is added here. `[C]`
    pub gain_gradient: &'a mut [f32],
}

impl WithSimd for NormSiluGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let positions = self.gradient.len() / self.gain.len();
        for start in (0..positions).step_by(STRETCH) {
            self.stretch(start, STRETCH.min(positions - start), positions);
        }
    }
}

impl NormSiluGradient<'_> {
    #[inline(always)]
    fn stretch(&mut self, start: usize, len: usize, positions: usize) {
        let inverse = inverse_lengths(self.x, self.stride, self.gain.len(), start, len);
        let mut dot = [0.0_f32; STRETCH];
        let mut product = [0.0_f32; STRETCH];
        for (c, gain) in self.gain.iter().enumerate() {
            let x = &self.x[c * self.stride + start..][..len];
            let gradient = &mut self.gradient[c * positions + start..][..len];
            for i in 0..len {
                let along = x[i] * inverse[i];
                let u = along * gain;
                let s = sigmoid(u);
                let du = gradient[i] * s * (1.0 + u * (1.0 - s));
                gradient[i] = du;
                product[i] = du * along;
                dot[i] += product[i] * gain;
            }
            self.gain_gradient[c] += sum(&product);
        }
        for (c, gain) in self.gain.iter().enumerate() {
            let x = &self.x[c * self.stride + start..][..len];
            let gradient = &mut self.gradient[c * positions + start..][..len];
            for i in 0..len {
                // Below the smallest length the norm is a constant.
                let radial = if inverse[i] < 1.0 / EPSILON { x[i] * inverse[i] * dot[i] } else { 0.0 };
                gradient[i] = inverse[i] * (gain * gradient[i] - radial);
            }
        }
    }
}

#[inline(always)]
fn inverse_lengths(x: &[f32], stride: usize, channels: usize, start: usize, len: usize) -> [f32; STRETCH] {
    let mut squares = [0.0_f32; STRETCH];
    for c in 0..channels {
        let x = &x[c * stride + start..][..len];
        for (square, x) in squares[..len].iter_mut().zip(x) {
            *square += x * x;
        }
    }
    squares.map(|square| 1.0 / square.sqrt().max(EPSILON))
}

#[inline(always)]
fn sum(values: &[f32; STRETCH]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    for chunk in values.chunks_exact(16) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    lanes.iter().sum()
}
