//! How fast this machine is.

use burn::tensor::{Device, Tensor};
use std::time::{Duration, Instant};

/// Rows, inputs and outputs of the product that is timed: a projection of Wan2.1 1.3B on 1,024 tokens.
const SIZE: [usize; 3] = [1024, 1536, 1536];
/// How long is measured.
const TIME: Duration = Duration::from_secs(2);

/// Floating-point operations per second of the matrix product that the transformer uses, in f32 on the CPU: the upper limit of what a run
/// reaches.
pub fn matrix_rate() -> f64 {
    let [rows, inputs, outputs] = SIZE;
    let device = Device::flex();
    let (x, weight) = (Tensor::<2>::ones([rows, inputs], &device), Tensor::<2>::ones([outputs, inputs], &device));
    let product = || wan::ops::linear(x.clone(), weight.clone(), None, None);
    product();
    let (start, mut count) = (Instant::now(), 0_u32);
    while start.elapsed() < TIME {
        product();
        count += 1;
    }
    2.0 * f64::from(count) * (rows * inputs * outputs) as f64 / start.elapsed().as_secs_f64()
}
