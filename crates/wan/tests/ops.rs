//! Every fused operation against the form composed of the engine's operations, forward and all gradients, on sizes that are no multiples
//! of any vector width; and the promises of `wan::ops`: the same bits with and without a graph, for any number of threads, and
//! whatever else is in the batch.

mod common;

use burn::tensor::{Device, Tensor, TensorData};
use common::relative_error;
use wan::ops::{self, LowRank, Modulation};
use wan::weights::to_floats;

const TOLERANCE: f64 = 3e-6;
const EPS: f64 = 1e-6;

fn noise(seed: u64, shape: &[usize]) -> Tensor<1> {
    let key = grpo::Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
    let values = key.normals(shape.iter().product());
    Tensor::from_data(TensorData::new(values.clone(), [values.len()]), &Device::flex())
}

type Op<'a> = &'a dyn Fn(&[Tensor<1>]) -> Tensor<1>;

/// The output, and the gradients of sum(output * weights) with respect to all inputs.
fn run(op: Op, inputs: &[Tensor<1>]) -> Vec<Vec<f32>> {
    let inputs: Vec<_> = inputs.iter().map(|x| x.clone().autodiff().require_grad()).collect();
    let output = op(&inputs);
    let weights = noise(99, &[output.dims()[0]]).autodiff();
    let grads = (output.clone() * weights).sum().backward();
    let gradients = inputs.iter().map(|x| to_floats(x.grad(&grads).expect("a gradient")));
    std::iter::once(to_floats(output.inner())).chain(gradients).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool").install(f)
}

/// Compares the fused with the composed form, and checks the promises.
#[track_caller]
fn check(fused: impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync, composed: Op, shapes: &[&[usize]]) {
    let inputs: Vec<_> = shapes.iter().enumerate().map(|(i, shape)| noise(i as u64, shape)).collect();
    let (ours, reference) = (run(&fused, &inputs), run(composed, &inputs));
    for (i, (a, b)) in ours.iter().zip(&reference).enumerate() {
        let error = relative_error(a, b);
        assert!(error <= TOLERANCE, "{shapes:?}: {}: {error:e}", if i == 0 { "output".into() } else { format!("gradient {}", i - 1) });
    }
    assert_eq!(bits(&to_floats(fused(&inputs))), bits(&ours[0]), "{shapes:?}: plain and autodiff");
    for threads in [1, 2, 3] {
        let again = with_threads(threads, || run(&fused, &inputs));
        assert!(again.iter().zip(&ours).all(|(a, b)| bits(a) == bits(b)), "{shapes:?}: {threads} threads");
    }
    only_what_is_tracked(&fused, &inputs, &ours);
}

/// Each gradient alone must equal the one computed with all others.
#[track_caller]
fn only_what_is_tracked(fused: Op, inputs: &[Tensor<1>], all: &[Vec<f32>]) {
    for tracked in 0..inputs.len() {
        let mut some: Vec<_> = inputs.iter().map(|x| x.clone().autodiff()).collect();
        some[tracked] = some[tracked].clone().require_grad();
        let output = fused(&some);
        let weights = noise(99, &[output.dims()[0]]).autodiff();
        let grads = (output * weights).sum().backward();
        let alone = to_floats(some[tracked].grad(&grads).expect("a gradient"));
        assert_eq!(bits(&alone), bits(&all[tracked + 1]), "gradient {tracked} alone");
        assert!(some.iter().enumerate().all(|(i, x)| i == tracked || x.grad(&grads).is_none()), "gradients of constants");
    }
}

#[test]
fn gelu_matches_the_composed_form() {
    for n in [1, 15, 255, 257, 70_001] {
        let composed = |x: &[Tensor<1>]| {
            let inner = (x[0].clone() + x[0].clone().powi_scalar(3).mul_scalar(0.044715)).mul_scalar((2.0 / std::f64::consts::PI).sqrt());
            x[0].clone().mul_scalar(0.5) * inner.tanh().add_scalar(1.0)
        };
        check(|x| ops::gelu_tanh(x[0].clone()), &composed, &[&[n]]);
    }
    let far = Tensor::<1>::from_floats([-1e30, -200.0, -0.0, 200.0, 1e12], &Device::flex());
    let far = to_floats(ops::gelu_tanh(far));
    assert!(far[..3].iter().all(|v| v.abs() < 1e-7) && far[3] == 200.0 && far[4] == 1e12, "{far:?}");
}

#[test]
fn modulated_norm_matches_the_composed_form() {
    for (x, m) in
        [([3, 5, 7], [3, 1, 7]), ([2, 70, 33], [2, 70, 33]), ([2, 150, 48], [2, 1, 48]), ([3, 90, 17], [1, 1, 17]), ([1, 1, 9], [1, 1, 9])]
    {
        for offset in [0.0, 1.0] {
            let composed = move |t: &[Tensor<1>]| {
                let (x, scale, shift) = (t[0].clone().reshape(x), t[1].clone().reshape(m), t[2].clone().reshape(m));
                let centred = x.clone() - x.mean_dim(2);
                let var = centred.clone().powi_scalar(2).mean_dim(2);
                (centred / var.add_scalar(EPS).sqrt() * scale.add_scalar(offset) + shift).flatten(0, 2)
            };
            let fused = move |t: &[Tensor<1>]| {
                let (x, scale, shift) = (t[0].clone().reshape(x), t[1].clone().reshape(m), t[2].clone().reshape(m));
                ops::modulated_norm(x, scale, shift, Modulation { offset, eps: EPS }).flatten(0, 2)
            };
            check(fused, &composed, &[&x, &m, &m]);
        }
    }
}

#[test]
fn gated_sum_matches_the_composed_form() {
    for (x, m) in [([3, 5, 7], [3, 1, 7]), ([2, 70, 33], [2, 70, 33]), ([2, 150, 48], [2, 1, 48])] {
        let shaped = move |t: &[Tensor<1>]| (t[0].clone().reshape(x), t[1].clone().reshape(x), t[2].clone().reshape(m));
        let composed = move |t: &[Tensor<1>]| {
            let (x, h, gate): (Tensor<3>, Tensor<3>, Tensor<3>) = shaped(t);
            (x + h * gate).flatten(0, 2)
        };
        let fused = move |t: &[Tensor<1>]| {
            let (x, h, gate) = shaped(t);
            ops::gated_sum(x, h, gate).flatten(0, 2)
        };
        check(fused, &composed, &[&x, &x, &m]);
    }
}

fn angles(l: usize, d: usize) -> (Tensor<4>, Tensor<4>) {
    let angle = noise(50, &[l, d / 2]).reshape([l, d / 2, 1]).repeat_dim(2, 2).reshape([1, l, 1, d]);
    (angle.clone().cos(), angle.sin())
}

/// x cos + (-x_1, x_0, -x_3, x_2, ..) sin
fn rotate(x: Tensor<4>, (cos, sin): (Tensor<4>, Tensor<4>)) -> Tensor<4> {
    let dims @ [b, l, h, d] = x.dims();
    let pairs = x.clone().reshape([b, l, h, d / 2, 2]);
    let swapped = Tensor::cat(vec![pairs.clone().narrow(4, 1, 1).neg(), pairs.narrow(4, 0, 1)], 4).reshape(dims);
    let (cos, sin) = if x.is_autodiff() { (cos.autodiff(), sin.autodiff()) } else { (cos, sin) };
    x * cos + swapped * sin
}

#[test]
fn rms_norm_rotate_matches_the_composed_form() {
    for (x @ [b, l, dim], d, rotated) in [([3, 5, 14], 14, true), ([2, 70, 36], 6, true), ([2, 40, 33], 33, false), ([1, 1, 8], 4, true)] {
        let angles = rotated.then(|| angles(l, d));
        let composed = |t: &[Tensor<1>]| {
            let x: Tensor<3> = t[0].clone().reshape(x);
            let inv = x.clone().powi_scalar(2).mean_dim(2).add_scalar(EPS).sqrt().recip();
            let y = x * inv * t[1].clone().reshape([1, 1, dim]);
            match angles.clone() {
                Some(angles) => rotate(y.reshape([b, l, dim / d, d]), angles).flatten(0, 3),
                None => y.flatten(0, 2),
            }
        };
        let fused = |t: &[Tensor<1>]| ops::rms_norm_rotate(t[0].clone().reshape(x), t[1].clone(), angles.clone(), EPS).flatten(0, 2);
        check(fused, &composed, &[&x, &[dim]]);
    }
}

#[test]
fn linear_matches_the_composed_form() {
    for [rows, inputs, outputs, rank] in [[1, 3, 5, 1], [50, 33, 70, 4], [131, 64, 96, 3], [97, 1030, 31, 17], [20, 100, 300, 2]] {
        let shaped = move |t: &[Tensor<1>]| (t[0].clone().reshape([rows, inputs]), t[1].clone().reshape([outputs, inputs]));
        let composed = move |t: &[Tensor<1>]| {
            let (x, w): (Tensor<2>, Tensor<2>) = shaped(t);
            let (a, b): (Tensor<2>, Tensor<2>) = (t[3].clone().reshape([rank, inputs]), t[4].clone().reshape([outputs, rank]));
            let low = x.clone().matmul(a.transpose()).matmul(b.transpose()).mul_scalar(0.5);
            (x.matmul(w.transpose()) + t[2].clone().unsqueeze() + low).flatten(0, 1)
        };
        let fused = move |t: &[Tensor<1>]| {
            let (x, w) = shaped(t);
            let adapter = LowRank { a: t[3].clone().reshape([rank, inputs]), b: t[4].clone().reshape([outputs, rank]), scale: 0.5 };
            ops::linear(x, w, Some(t[2].clone()), Some(adapter)).flatten(0, 1)
        };
        check(fused, &composed, &[&[rows, inputs], &[outputs, inputs], &[outputs], &[rank, inputs], &[outputs, rank]]);

        let composed = move |t: &[Tensor<1>]| {
            let (x, w): (Tensor<2>, Tensor<2>) = shaped(t);
            x.matmul(w.transpose()).flatten(0, 1)
        };
        let fused = move |t: &[Tensor<1>]| {
            let (x, w) = shaped(t);
            ops::linear(x, w, None, None).flatten(0, 1)
        };
        check(fused, &composed, &[&[rows, inputs], &[outputs, inputs]]);
    }
}

#[test]
fn attention_matches_the_composed_form() {
    for ([b, l, t], heads, d, biased) in [
        ([2, 5, 3], 2, 7, true),
        ([1, 80, 80], 3, 32, false),
        ([2, 131, 13], 2, 64, true),
        ([3, 1, 1], 1, 9, false),
        ([1, 70, 1100], 2, 12, true),
    ] {
        let dim = heads * d;
        let bias = biased.then(|| noise(60, &[t]).reshape([1, 1, 1, t]));
        let shaped = move |x: &[Tensor<1>]| [(0, l), (1, t), (2, t)].map(|(i, rows)| x[i].clone().reshape([b, rows, dim]));
        let composed = |x: &[Tensor<1>]| {
            let [q, k, v]: [Tensor<4>; 3] = shaped(x).map(|x: Tensor<3>| {
                let rows = x.dims()[1];
                x.reshape([b, rows, heads, d]).swap_dims(1, 2)
            });
            let mut scores = q.matmul(k.transpose()).div_scalar((d as f64).sqrt());
            if let Some(bias) = bias.clone() {
                scores = scores.clone() + if scores.is_autodiff() { bias.autodiff() } else { bias };
            }
            burn::tensor::activation::softmax(scores, 3).matmul(v).swap_dims(1, 2).flatten(0, 3)
        };
        let fused = |x: &[Tensor<1>]| {
            let [q, k, v] = shaped(x);
            ops::attention(q, k, v, bias.clone(), heads).flatten(0, 2)
        };
        check(fused, &composed, &[&[b, l, dim], &[b, t, dim], &[b, t, dim]]);
    }
}

/// The bits of one sample, alone and as the last of batches of several sizes.
#[test]
fn a_sample_does_not_depend_on_its_batch() {
    let ([l, dim, t, heads], hidden) = ([37, 48, 13, 2], 100);
    let (w, up, scale) = (noise(1, &[dim, dim]).reshape([dim, dim]), noise(2, &[hidden, dim]).reshape([hidden, dim]), noise(3, &[dim]));
    let network = |x: Tensor<3>, kv: Tensor<3>| {
        let b = x.dims()[0];
        let modulation = || x.clone().narrow(1, 0, 1);
        let y = ops::modulated_norm(x.clone(), modulation(), modulation(), Modulation { offset: 1.0, eps: EPS });
        let q = ops::linear(y.reshape([b * l, dim]), w.clone(), Some(scale.clone()), None).reshape([b, l, dim]);
        let q = ops::rms_norm_rotate(q, scale.clone(), Some(angles(l, dim / heads)), EPS);
        let y = ops::gated_sum(x.clone(), ops::attention(q, kv.clone(), kv, None, heads), modulation());
        ops::gelu_tanh(ops::linear(y.reshape([b * l, dim]), up.clone(), None, None)).reshape([b, l * hidden])
    };
    let (x, kv) = (noise(4, &[6, l, dim]).reshape([6, l, dim]), noise(5, &[6, t, dim]).reshape([6, t, dim]));
    let alone = to_floats(network(x.clone().narrow(0, 5, 1), kv.clone().narrow(0, 5, 1)));
    for from in 0..5 {
        let batch = network(x.clone().narrow(0, from, 6 - from), kv.clone().narrow(0, from, 6 - from));
        let last = to_floats(batch.narrow(0, 5 - from, 1));
        assert_eq!(bits(&last), bits(&alone), "as the last of {}", 6 - from);
    }
}
