//! Both attentions against an implementation in plain loops over f64: output and gradients, self-attention and cross-attention with the padding
//! of the text collapsed into one key, in f32 and bf16.

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData};
use common::device::{allowed, device, half};
use common::relative_error;
use wan::layers::cast;
use wan::ops;
use wan::transformer::attention::{attention, is_fused};
use wan::weights::to_floats;

/// Sizes: samples, queries, keys, heads, features of a head.
#[derive(Debug, Clone, Copy)]
struct Size {
    b: usize,
    l: usize,
    t: usize,
    heads: usize,
    d: usize,
}

impl Size {
    /// Place of the head's first feature in row `row` of a tensor [B, rows, heads, d].
    fn at(self, rows: usize, sample: usize, row: usize, head: usize) -> usize {
        ((sample * rows + row) * self.heads + head) * self.d
    }
}

/// q [B, L, heads, d], k and v [B, T, heads, d], and the gradient of the output.
#[derive(Debug, Clone)]
struct Inputs {
    size: Size,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    /// Added to the scores of each key `[T]`.
    bias: Vec<f64>,
    gradient: Vec<f64>,
}

fn normals(seed: u64, count: usize) -> Vec<f64> {
    let key = grpo::Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
    // representable in bf16, so that both precisions start from the same numbers
    key.normals(count).into_iter().map(|x| f64::from(f32::from_bits(x.to_bits() & 0xffff_0000))).collect()
}

impl Inputs {
    fn new(size: Size) -> Self {
        let Size { b, l, t, heads, d } = size;
        let (queries, keys) = (b * l * heads * d, b * t * heads * d);
        let [q, gradient] = [1, 2].map(|seed| normals(seed, queries));
        let [k, v] = [3, 4].map(|seed| normals(seed, keys));
        Self { size, q, k, v, bias: vec![0.0; t], gradient }
    }

    /// o, dq, dk, dv.
    ///
    /// ```text
    /// p_j = exp(s_j) / sum exp(s),  s_j = q k_j / sqrt(d) + bias_j     o = sum p_j v_j
    /// dp_j = g v_j    ds_j = p_j (dp_j - sum p dp)    dq = sum ds_j k_j / sqrt(d)    dk_j = ds_j q / sqrt(d)    dv_j = p_j g
    /// ```
    fn reference(&self) -> [Vec<f64>; 4] {
        let Size { b, l, t, heads, d } = self.size;
        let scale = 1.0 / (d as f64).sqrt();
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let [mut o, mut dq] = [vec![0.0; self.q.len()], vec![0.0; self.q.len()]];
        let [mut dk, mut dv] = [vec![0.0; self.k.len()], vec![0.0; self.k.len()]];
        for (sample, head) in (0..b).flat_map(|sample| (0..heads).map(move |head| (sample, head))) {
            let key_at = |j: usize| self.size.at(t, sample, j, head);
            for i in 0..l {
                let at = self.size.at(l, sample, i, head);
                let (q, g) = (&self.q[at..at + d], &self.gradient[at..at + d]);
                let scores: Vec<f64> = (0..t).map(|j| scale * dot(q, &self.k[key_at(j)..key_at(j) + d]) + self.bias[j]).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exps: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = exps.iter().sum();
                let p: Vec<f64> = exps.iter().map(|e| e / total).collect();
                let dp: Vec<f64> = (0..t).map(|j| dot(g, &self.v[key_at(j)..key_at(j) + d])).collect();
                let expected = dot(&p, &dp);
                for j in 0..t {
                    let (ds, from) = (p[j] * (dp[j] - expected) * scale, key_at(j));
                    for x in 0..d {
                        o[at + x] += p[j] * self.v[from + x];
                        dq[at + x] += ds * self.k[from + x];
                        dk[from + x] += ds * q[x];
                        dv[from + x] += p[j] * g[x];
                    }
                }
            }
        }
        [o, dq, dk, dv]
    }

    /// As [`reference`](Self::reference), by [`ops::attention`].
    fn by_rows(&self, dtype: DType) -> [Vec<f64>; 4] {
        let Size { b, l, t, heads, d } = self.size;
        let leaf = |x: &[f64], rows: usize| tensor(x, [b, rows, heads * d], dtype).autodiff().require_grad();
        let [q, k, v] = [leaf(&self.q, l), leaf(&self.k, t), leaf(&self.v, t)];
        let output = ops::attention(q.clone(), k.clone(), v.clone(), self.bias(), heads);
        gradients(output, tensor(&self.gradient, [b, l, heads * d], dtype), [q, k, v])
    }

    /// As [`reference`](Self::reference), by what other devices compute.
    fn by_heads(&self, dtype: DType, device: &Device) -> [Vec<f64>; 4] {
        let Size { b, l, t, heads, d } = self.size;
        let on_device = |x: &[f64], rows: usize| cast(tensor(x, [b, rows, heads, d], DType::F32).to_device(device), dtype);
        let leaf = |x: &[f64], rows: usize| on_device(x, rows).autodiff().require_grad();
        let [q, k, v] = [leaf(&self.q, l), leaf(&self.k, t), leaf(&self.v, t)];
        let [split_q, split_k, split_v] = [&q, &k, &v].map(|x| x.clone().swap_dims(1, 2));
        let bias = self.bias().map(|bias| bias.to_device(device));
        let output = attention(split_q, split_k, split_v, bias.as_ref()).swap_dims(1, 2);
        gradients(output, on_device(&self.gradient, l), [q, k, v])
    }

    fn bias(&self) -> Option<Tensor<4>> {
        let bias = tensor(&self.bias, [1, 1, 1, self.size.t], DType::F32);
        self.bias.iter().any(|bias| *bias != 0.0).then_some(bias)
    }

    /// The last key as `count` keys of no bias.
    fn expanded(&self, count: usize) -> Self {
        let size = Size { t: self.size.t - 1 + count, ..self.size };
        let repeat = |x: &[f64]| -> Vec<f64> {
            let row = self.size.heads * self.size.d;
            let sample = |rows: &[f64]| [rows, &rows[rows.len() - row..].repeat(count - 1)].concat();
            x.chunks_exact(self.size.t * row).flat_map(sample).collect()
        };
        Self { size, k: repeat(&self.k), v: repeat(&self.v), bias: vec![0.0; size.t], ..self.clone() }
    }

    /// The gradient of keys or values of [`expanded`](Self::expanded), the repeated rows added up.
    fn collapsed(&self, gradient: &[f64]) -> Vec<f64> {
        let (row, t) = (self.size.heads * self.size.d, self.size.t);
        let rows = gradient.len() / row / self.size.b;
        let sample = |rows: &[f64]| {
            let mut kept = rows[..t * row].to_vec();
            for again in rows[t * row..].chunks_exact(row) {
                kept[(t - 1) * row..].iter_mut().zip(again).for_each(|(sum, term)| *sum += term);
            }
            kept
        };
        gradient.chunks_exact(rows * row).flat_map(sample).collect()
    }
}

fn tensor<const D: usize>(values: &[f64], shape: [usize; D], dtype: DType) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    cast(Tensor::from_data(TensorData::new(values, shape), &Device::flex()), dtype)
}

fn gradients<const D: usize>(output: Tensor<D>, gradient: Tensor<D>, inputs: [Tensor<D>; 3]) -> [Vec<f64>; 4] {
    let grads = (output.clone() * gradient.autodiff()).sum().backward();
    let wide = |x: Tensor<D>| to_floats(x).into_iter().map(f64::from).collect();
    let [dq, dk, dv] = inputs.map(|x| wide(x.grad(&grads).expect("a gradient")));
    [wide(output.inner()), dq, dk, dv]
}

const NAMES: [&str; 4] = ["output", "gradient of q", "gradient of k", "gradient of v"];

/// `max |a - b| / max |b|` of the output and of each gradient.
#[track_caller]
fn check(what: &str, ours: &[Vec<f64>; 4], reference: &[Vec<f64>; 4], bounds: [f64; 4]) {
    for (((name, ours), reference), bound) in NAMES.iter().zip(ours).zip(reference).zip(bounds) {
        let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
        let error = relative_error(&narrow(ours), &narrow(reference));
        assert!(error <= bound, "{what}: {name}: {error:.2e}, allowed {bound:e}");
    }
}

/// In f32.
const EXACT: [f64; 4] = [2e-6, 5e-6, 5e-6, 5e-6];
/// In bf16 with everything but inputs and results in f32: half a unit in the last place, 2^-8, of the largest.
const ROUNDED_ONCE: [f64; 4] = [4e-3; 4];
/// In bf16 with the factors of every product in bf16: scaled queries, scores, probabilities and their gradients are rounded. What is left of
/// dp - sum p dp, where one key takes nearly all, has few digits.
const ROUNDED: [f64; 4] = [1e-2, 5e-2, 5e-2, 1e-2];

/// Small sizes, one of which crosses the chunks of both.
fn sizes() -> Vec<Size> {
    let size = |b, l, t, heads, d| Size { b, l, t, heads, d };
    vec![size(2, 7, 7, 2, 6), size(1, 48, 48, 3, 16), size(2, 33, 9, 2, 12), size(1, 520, 21, 1, 4), size(1, 5, 300, 2, 8)]
}

fn check_all(what: &str, inputs: &Inputs, reference: &[Vec<f64>; 4]) {
    check(&format!("{what}, by rows"), &inputs.by_rows(DType::F32), reference, EXACT);
    check(&format!("{what}, by heads"), &inputs.by_heads(DType::F32, &Device::flex()), reference, EXACT);
    check(&format!("{what}, by rows in bf16"), &inputs.by_rows(DType::BF16), reference, ROUNDED_ONCE);
    check(&format!("{what}, by heads in bf16"), &inputs.by_heads(DType::BF16, &Device::flex()), reference, ROUNDED);
}

#[test]
fn self_attention_is_that_of_plain_loops() {
    for size in sizes().into_iter().filter(|size| size.l == size.t) {
        let inputs = Inputs::new(size);
        check_all(&format!("{size:?}"), &inputs, &inputs.reference());
    }
}

/// The last key stands for the zero padding of the text, with the logarithm of its count as bias.
#[test]
fn cross_attention_with_collapsed_padding_is_that_of_plain_loops_over_all_of_it() {
    for (size, padding) in sizes().into_iter().filter(|size| size.l != size.t).zip([5, 491, 2]) {
        let mut inputs = Inputs::new(size);
        inputs.bias[size.t - 1] = f64::from(f64::from(padding as u32).ln() as f32);
        let [o, dq, dk, dv] = inputs.expanded(padding).reference();
        let reference = [o, dq, inputs.collapsed(&dk), inputs.collapsed(&dv)];
        check("plain loops over the collapsed keys", &inputs.reference(), &reference, [1e-6; 4]);
        check_all(&format!("{size:?}, padding {padding}"), &inputs, &reference);
    }
}

/// In half precision where the tests run: the fused kernel of devices that have one, with heads and tokens of several sizes, some of which fill no group of
/// threads; and with the collapsed padding, for which there is none.
#[test]
fn half_precision_attention_of_the_device_is_that_of_plain_loops() {
    let (Some(half), device) = (half(), device()) else { return };
    for (l, t, d) in [(300, 300, 32), (128, 128, 64), (261, 261, 128), (20, 20, 32), (140, 9, 32)] {
        let mut inputs = Inputs::new(Size { b: 2, l, t, heads: 2, d });
        inputs.bias[t - 1] = if l == t { 0.0 } else { 5.0 };
        let fused = is_fused(&Tensor::zeros([2, 2, l, d], (&device, half)), inputs.bias().as_ref());
        let ours = inputs.by_heads(half, &device);
        check(&format!("{l} queries, {t} keys, heads of {d}, fused: {fused}"), &ours, &inputs.reference(), ROUNDED);
    }
}

/// Rows of scores that are longer than what one thread, or one plane of threads, reduces on a device.
#[test]
fn attention_of_the_device_matches_reference_loops_over_rows_of_any_length() {
    for t in [3, 1000, 5000] {
        let inputs = Inputs::new(Size { b: 2, l: 37, t, heads: 2, d: 16 });
        check(&format!("{t} keys"), &inputs.by_heads(DType::F32, &device()), &inputs.reference(), EXACT.map(allowed));
    }
}

/// The loops' own gradients are slopes of their output, by central differences.
#[test]
fn gradients_of_the_loops_are_slopes() {
    let mut inputs = Inputs::new(Size { b: 2, l: 3, t: 4, heads: 2, d: 3 });
    inputs.bias[3] = 2.0;
    let [_, dq, dk, dv] = inputs.reference();
    let value = |inputs: &Inputs| inputs.reference()[0].iter().zip(&inputs.gradient).map(|(o, g)| o * g).sum::<f64>();
    let places: [fn(&mut Inputs) -> &mut Vec<f64>; 3] = [|x| &mut x.q, |x| &mut x.k, |x| &mut x.v];
    for (place, gradient) in places.into_iter().zip([dq, dk, dv]) {
        for (i, expected) in gradient.iter().enumerate() {
            let at = |h: f64| {
                let mut moved = inputs.clone();
                place(&mut moved)[i] += h;
                value(&moved)
            };
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((slope - expected).abs() < 1e-8, "{slope} and {expected}");
        }
    }
}
