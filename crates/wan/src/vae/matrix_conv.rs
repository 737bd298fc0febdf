//! The convolution as products of matrices, for inference on devices whose matrix units the engine's own convolution leaves idle.
//!
//! ```text
//! y[o, n] = sum_k W[o, k] x[k, n] + b[o],   k = (tap, channel), n = (frame, row, column) of the output
//! ```
//!
//! The right factor is the input gathered once for each tap of the kernel: 27 times the input, so it is made for a band of rows at a time.
//!
//! Legend: as `causal_conv`; primes: of the output.

use burn::tensor::Tensor;
use burn::tensor::ops::PadMode;
use std::ops::Range;

/// Elements of the gathered input: 256 MiB.
const MAX_GATHERED: usize = 1 << 26;

/// Channels below which tiles of matrix units are mostly empty.
const MIN_CHANNELS: usize = 16;

/// Whether [`conv3d_by_products`] is meant for x: not on the CPU, where nothing is to be recorded, steps of 1.
pub fn is_wanted(x: &Tensor<5>, stride: [usize; 3]) -> bool {
    !crate::device::is_cpu(&x.device()) && !x.is_autodiff() && stride == [1; 3] && x.dims()[1] >= MIN_CHANNELS
}

/// x [B, C, F, H, W], weight [O, C, kt, kh, kw], bias `[O]` -> [B, O, F', H', W'], in steps of 1.
pub fn conv3d_by_products(x: Tensor<5>, weight: Tensor<5>, bias: Tensor<1>, padding: [(usize, usize); 3]) -> Tensor<5> {
    in_bands(x, weight, bias, padding, MAX_GATHERED)
}

fn in_bands(x: Tensor<5>, weight: Tensor<5>, bias: Tensor<1>, padding: [(usize, usize); 3], limit: usize) -> Tensor<5> {
    let x = if padding == [(0, 0); 3] { x } else { x.pad(padding, PadMode::Constant(0.0)) };
    let ([batch, channels, frames, height, width], [outputs, _, kt, kh, kw]) = (x.dims(), weight.dims());
    let [frames, height, width] = [frames + 1 - kt, height + 1 - kh, width + 1 - kw];
    let matrix = weight.permute([0, 2, 3, 4, 1]).reshape([1, outputs, kt * kh * kw * channels]);
    let bias = bias.reshape([1, outputs, 1]);
    let of_taps = |t: usize| (0..kh).flat_map(move |y| (0..kw).map(move |x| [t, y, x]));
    let taps: Vec<[usize; 3]> = (0..kt).flat_map(of_taps).collect();
    let band = |f: Range<usize>, h: Range<usize>| {
        let gather = |&[t, y, from]: &[usize; 3]| {
            let places = [0..batch, 0..channels, f.start + t..f.end + t, h.start + y..h.end + y, from..from + width];
            x.clone().slice(places).reshape([batch, channels, f.len() * h.len() * width])
        };
        let gathered = Tensor::cat(taps.iter().map(gather).collect(), 1);
        (matrix.clone().matmul(gathered) + bias.clone()).reshape([batch, outputs, f.len(), h.len(), width])
    };
    let of_a_row = batch * channels * taps.len() * width;
    let rows = (limit / of_a_row).clamp(1, height);
    let together = (limit / (of_a_row * height)).clamp(1, frames);
    let bands = |f: Range<usize>| Tensor::cat(ranges(height, rows).map(|h| band(f.clone(), h)).collect(), 3);
    Tensor::cat(ranges(frames, together).map(bands).collect(), 2)
}

/// `0..length` in pieces.
fn ranges(length: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(piece).map(move |start| start..(start + piece).min(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::module::conv3d;
    use burn::tensor::ops::ConvOptions;
    use burn::tensor::{Device, TensorData};
    use grpo::random::{Key, Purpose};

    fn normals<const D: usize>(prompt: u64, shape: [usize; D]) -> Tensor<D> {
        let key = Key { seed: 1, iteration: 0, prompt, rollout: 0, purpose: Purpose::Data };
        Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), &Device::flex())
    }

    #[test]
    fn products_give_what_the_convolution_gives() {
        // causal, of each frame, of each place
        for (kernel, padding) in [([3, 3, 3], [(2, 0), (1, 1), (1, 1)]), ([1, 3, 3], [(0, 0), (1, 1), (1, 1)]), ([1; 3], [(0, 0); 3])] {
            let (x, bias) = (normals(1, [2, 17, 4, 6, 5]), normals(3, [7]));
            let weight = normals(2, [7, 17, kernel[0], kernel[1], kernel[2]]);
            let padded = x.clone().pad(padding, PadMode::Constant(0.0));
            let expected = conv3d(padded, weight.clone(), Some(bias.clone()), ConvOptions::new([1; 3], [0; 3], [1; 3], 1));
            // everything at once, bands of two rows, one row, two frames
            let of_a_row = 2 * 17 * kernel.iter().product::<usize>() * 5;
            for limit in [usize::MAX, 2 * of_a_row, 1, 12 * of_a_row] {
                let ours = in_bands(x.clone(), weight.clone(), bias.clone(), padding, limit);
                assert_eq!(ours.dims(), expected.dims());
                let worst = crate::weights::to_floats((ours - expected.clone()).abs().max())[0];
                assert!(worst < 5e-5, "{kernel:?} {limit}: {worst:e}");
            }
        }
    }
}
