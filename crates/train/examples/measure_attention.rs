//! Time and memory of attention, forward and backward, that computes the probabilities again, beside the form that keeps them.
//!
//! ```text
//! measure_attention [--runs N] [TOKENS ..]
//! ```
//!
//! 12 heads of 128 features, one sample, f32, on the CPU. The two forms run in turn; the memory of each is measured in a process of its own, from
//! the inputs on. Prints a Markdown table; docs/benchmarks.md has the results.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor, TensorData};
use std::io::Write;
use std::process::Command;
use std::time::Instant;
use wan::ops;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HEADS: usize = 12;
const FEATURES: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Recomputing,
    Materialised,
}

fn main() {
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut take = |name: &str| {
        let at = args.iter().position(|arg| arg == name)?;
        args.remove(at);
        Some(args.remove(at))
    };
    let (only, runs) = (take("--only"), take("--runs").map_or(3, |runs| runs.parse().expect("a number")));
    let tokens: Vec<usize> = args.iter().map(|tokens| tokens.parse().expect("a number of tokens")).collect();
    let mut out = std::io::stdout().lock();
    if let Some(form) = only {
        let form = if form == "Recomputing" { Form::Recomputing } else { Form::Materialised };
        let _ = writeln!(out, "{}", memory(form, tokens[0]));
        return;
    }
    let tokens = if tokens.is_empty() { vec![1024, 2048, 4096] } else { tokens };
    let _ = writeln!(out, "| tokens | kept s | again s | ratio | kept MiB | again MiB |\n|---|---|---|---|---|---|");
    for tokens in tokens {
        let [kept, again] = times(tokens, runs);
        let [kept_mib, again_mib] = [Form::Materialised, Form::Recomputing].map(|form| memory_of_process(form, tokens));
        let ratio = kept / again;
        let _ = writeln!(out, "| {tokens} | {kept:.2} | {again:.2} | {ratio:.2} | {kept_mib} | {again_mib} |");
    }
}

/// The fastest of some runs of each form, in turn, after an unmeasured one: kept, computed again.
fn times(tokens: usize, runs: usize) -> [f64; 2] {
    let inputs = inputs(tokens);
    let mut fastest = [f64::INFINITY; 2];
    for run in 0..=runs {
        for (form, fastest) in [Form::Materialised, Form::Recomputing].into_iter().zip(&mut fastest) {
            let start = Instant::now();
            step(form, &inputs);
            if run > 0 {
                *fastest = fastest.min(start.elapsed().as_secs_f64());
            }
        }
    }
    fastest
}

/// q, k, v [1, L, D], and the gradient of the output.
fn inputs(tokens: usize) -> [Tensor<3>; 4] {
    let shape = [1, tokens, HEADS * FEATURES];
    [1, 2, 3, 4].map(|seed| {
        let key = grpo::Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
        Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), &Device::flex())
    })
}

/// Forward and backward.
fn step(form: Form, [q, k, v, gradient]: &[Tensor<3>; 4]) {
    let [q, k, v] = [q, k, v].map(|x| x.clone().autodiff().require_grad());
    let output = match form {
        Form::Recomputing => ops::attention(q.clone(), k.clone(), v.clone(), None, HEADS),
        Form::Materialised => materialised([&q, &k, &v]),
    };
    let gradients = (output * gradient.clone().autodiff()).sum().backward();
    for x in [q, k, v] {
        assert!(x.grad(&gradients).is_some(), "a gradient");
    }
}

/// softmax(q k^T / sqrt(d)) v by the engine's operations, whose backward keeps the probabilities.
fn materialised(inputs: [&Tensor<3>; 3]) -> Tensor<3> {
    let shape = inputs[0].dims();
    let [q, k, v] = inputs.map(|x| x.clone().reshape([1, shape[1], HEADS, FEATURES]).swap_dims(1, 2));
    let scores = q.mul_scalar(1.0 / (FEATURES as f64).sqrt()).matmul(k.transpose());
    softmax(scores, 3).matmul(v).swap_dims(1, 2).reshape(shape)
}

fn memory_of_process(form: Form, tokens: usize) -> u64 {
    let program = std::env::current_exe().expect("the path of this program");
    let output = Command::new(program).args(["--only", &format!("{form:?}"), &tokens.to_string()]).output().expect("a process");
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("MiB")
}

/// MiB at the peak of a step beyond its inputs.
fn memory(form: Form, tokens: usize) -> u64 {
    let inputs = inputs(tokens);
    let before = status("VmRSS");
    step(form, &inputs);
    status("VmHWM").saturating_sub(before) / 1024
}

/// An entry of /proc/self/status in KiB; 0 on other systems.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
