//! The autoencoder against the reference implementation (golden/README.md), against itself in another way, and its
//! gradients.

mod common;

use burn::tensor::{DType, Tensor, TensorData};
use common::device::{allowed, device, on_cpu};
use proptest::prelude::*;
use std::collections::HashMap;
use std::path::PathBuf;
use wan::vae::causal_conv::{Fusion, Geometry, conv3d, conv3d_of_engine};
use wan::vae::{AutoencoderKlWan, Posterior, Tiling, VaeConfig};
use wan::weights::WeightFiles;

/// Tolerance of golden/README.md for this model, relative to the largest reference value.
const TOLERANCE: f64 = 1e-4;

fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(path)
}

struct Reference(WeightFiles);

impl Reference {
    fn open(name: &str) -> Self {
        Self(WeightFiles::open_file(&golden(&format!("{name}.safetensors"))).expect("golden file"))
    }

    fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let shape = self.0.shape(name).unwrap_or_else(|| panic!("no `{name}`"));
        let values = self.0.floats(name).expect("floats");
        Tensor::from_data(TensorData::new(values, shape), &device())
    }

    #[track_caller]
    fn check(&self, name: &str, got: &Tensor<5>) {
        let expected: Tensor<5> = self.tensor(name);
        assert_eq!(got.dims(), expected.dims(), "{name}");
        let error = relative_error(got, &expected);
        assert!(error < allowed(TOLERANCE), "{name}: relative error {error:.1e}");
    }
}

fn values(x: &Tensor<5>) -> Vec<f32> {
    x.clone().inner().into_data().try_into_vec().expect("f32")
}

/// max |a - b| / max |b|
fn relative_error(a: &Tensor<5>, b: &Tensor<5>) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (values(a), values(b));
    let largest = b.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let difference = a.iter().zip(&b).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(a.iter().all(|v| v.is_finite()));
    f64::from(difference / largest)
}

fn tiny() -> AutoencoderKlWan {
    AutoencoderKlWan::load(&golden("wan-tiny/vae"), &device(), DType::F32).expect("wan-tiny")
}

fn small_config() -> VaeConfig {
    VaeConfig { base_dim: 4, num_res_blocks: 1, ..VaeConfig::default() }
}

fn noise<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let key = grpo::Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: grpo::Purpose::Data };
    Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), &device())
}

#[test]
fn matches_reference_encode() {
    let reference = Reference::open("vae");
    let vae = tiny();
    for case in ["f17", "f1", "f5b2"] {
        let Posterior { mean, logvar } = vae.encode(reference.tensor(&format!("{case}.video")));
        reference.check(&format!("{case}.mean"), &mean);
        reference.check(&format!("{case}.logvar"), &logvar);
        let moments: Tensor<5> = reference.tensor(&format!("{case}.moments"));
        assert!(relative_error(&mean, &moments.narrow(1, 0, 16)) < allowed(TOLERANCE));
        reference.check(&format!("{case}.latents_normalised"), &vae.normalise(mean.clone()));
        if case == "f17" {
            reference.check("f17.mean_float64", &mean);
        }
    }
}

#[test]
fn matches_reference_decode() {
    let reference = Reference::open("vae");
    let vae = tiny();
    for case in ["f17", "f1", "f5b2", "rand"] {
        let latents: Tensor<5> = reference.tensor(&format!("{case}.latents_normalised"));
        let decoded = vae.decode(vae.denormalise(latents.clone()));
        reference.check(&format!("{case}.decoded"), &decoded);
        let frames = vae.decode_to_frames(latents);
        assert!(relative_error(&frames, &(decoded.clone() * 0.5 + 0.5)) < 1e-6);
        if case == "rand" {
            reference.check("rand.decoded_float64", &decoded);
        }
    }
}

/// Wan2.2's: levels with paths around them, patches of pixels.
#[test]
fn matches_reference_wan22() {
    let reference = Reference::open("wan22_vae");
    let vae = AutoencoderKlWan::load(&golden("wan22-vae-tiny"), &device(), DType::F32).expect("wan22-vae-tiny");
    assert_eq!((vae.config.spatial_factor(), vae.config.temporal_factor()), (16, 4));
    for case in ["f9", "f1", "f5b2"] {
        let Posterior { mean, logvar } = vae.encode(reference.tensor(&format!("{case}.video")));
        reference.check(&format!("{case}.mean"), &mean);
        reference.check(&format!("{case}.logvar"), &logvar);
        let decoded = vae.decode(reference.tensor(&format!("{case}.latents")));
        reference.check(&format!("{case}.decoded"), &decoded);
        if case == "f9" {
            reference.check("f9.mean_float64", &mean);
            reference.check("f9.decoded_float64", &decoded);
        }
    }
}

/// The parameters of the released autoencoder of Wan2.2, whose file has 2.82 GB in f32.
#[test]
fn wan22_has_the_released_size() {
    let parameters = wan::vae::num_parameters(&VaeConfig::wan22());
    assert!((7.04e8..7.05e8).contains(&(parameters as f64)), "{parameters}");
}

#[test]
fn matches_reference_statistics() {
    let reference = Reference::open("vae");
    let config = tiny().config;
    for (name, ours) in [("latents_mean", config.latents_mean), ("latents_std", config.latents_std)] {
        let ours: Vec<f32> = ours.iter().map(|v| *v as f32).collect();
        assert_eq!(reference.0.floats(name).expect(name), ours);
    }
}

#[test]
fn matches_reference_tiled_decode() {
    let reference = Reference::open("vae");
    let mut vae = tiny();
    let latents: Tensor<5> = reference.tensor("tiled.latents_raw");
    reference.check("tiled.decoded_without_tiling", &vae.decode(latents.clone()));
    vae.tiling = Some(Tiling { tile: (32, 32), stride: (16, 24) });
    reference.check("tiled.decoded", &vae.decode(latents));
}

#[test]
fn matches_reference_intermediates() {
    let reference = Reference::open("vae_intermediates");
    let mut vae = tiny();
    vae.max_elements_per_pass = 0; // one latent frame at a time, as the reference
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut observer = |name: &str, x: &Tensor<5>| {
        let chunk = seen.entry(name.into()).or_default();
        reference.check(&format!("{name}.chunk{chunk}"), x);
        *chunk += 1;
    };
    let mean = vae.encode_observed(reference.tensor("video"), &mut observer).mean;
    let decoded = vae.decode_observed(reference.tensor("mean"), &mut observer);
    reference.check("mean", &mean);
    reference.check("decoded_from_mean", &decoded);
    let checked: usize = seen.values().sum();
    let stored = reference.0.names().filter(|name| name.contains(".chunk")).count();
    assert_eq!(checked, stored, "{seen:?}");
}

#[test]
fn a_clip_in_chunks_equals_the_whole_clip() {
    let video = noise([2, 3, 13, 16, 24]);
    let latents = noise([2, 16, 4, 2, 3]);
    let of = |temperal_downsample| VaeConfig { temperal_downsample, ..small_config() };
    let wan21 = [vec![false, true, true], vec![true, false, true], vec![false, false, true], vec![false; 3]].map(of);
    let wan22 = [vec![false, true, true], vec![true, true, false]].map(|down| VaeConfig { is_residual: true, ..of(down) });
    for config in wan21.into_iter().chain(wan22) {
        let mut vae = AutoencoderKlWan::random(config, 1, &device()).expect("config");
        vae.max_elements_per_pass = usize::MAX;
        let (encoded, decoded) = (vae.encode(video.clone()).mean, vae.decode_unclamped(latents.clone()));
        for frames in [0, 2, 3] {
            let elements = 2 * 16 * 24 * vae.config.base_dim * vae.config.temporal_factor();
            vae.max_elements_per_pass = frames * elements;
            let down = &vae.config.temperal_downsample;
            let error = relative_error(&vae.encode(video.clone()).mean, &encoded);
            assert!(error < TOLERANCE, "encode by {frames}, {down:?}: {error:.1e}");
            let error = relative_error(&vae.decode_unclamped(latents.clone()), &decoded);
            assert!(error < TOLERANCE, "decode by {frames}, {down:?}: {error:.1e}");
        }
    }
}

#[test]
fn the_network_does_not_look_ahead() {
    let vae = tiny();
    let video = noise([1, 3, 9, 16, 16]);
    let encoded = vae.encode(video.clone()).mean;
    let shorter = vae.encode(video.clone().narrow(2, 0, 5)).mean;
    assert!(relative_error(&shorter, &encoded.clone().narrow(2, 0, 2)) < 1e-6);
    let dropped = vae.encode(video.narrow(2, 0, 8)).mean;
    assert_eq!(values(&dropped), values(&shorter), "frames beyond 1 + 4k are dropped");
    let decoded = vae.decode(encoded.clone());
    assert!(relative_error(&vae.decode(encoded.narrow(2, 0, 2)), &decoded.narrow(2, 0, 5)) < 1e-6);
}

/// What a reward of a few frames gets is what it would find in the whole clip: bit for bit on the CPU, in one pass and in chunks of time.
#[test]
fn the_beginning_of_a_clip_is_decoded_alone() {
    let mut vae = tiny();
    let latents: Tensor<5> = noise([2, 16, 5, 3, 4]);
    for max_elements in [1 << 26, 2 * 24 * 32 * 4 * 4 * 2, 0] {
        vae.max_elements_per_pass = max_elements;
        let whole = vae.decode_to_frames(latents.clone());
        for frames in 1..=17 {
            let part = vae.decode_to_frames(vae.leading(latents.clone(), frames));
            let count = part.dims()[2];
            assert!((frames..frames + 4).contains(&count), "{count} frames for {frames}");
            let expected = whole.clone().narrow(2, 0, count);
            if on_cpu() {
                assert!(values(&part) == values(&expected), "{frames} frames, {max_elements} elements at once");
            } else {
                assert!(relative_error(&part, &expected) < allowed(1e-6));
            }
        }
    }
}

#[test]
fn tiles_without_overlap_of_context_are_cut_and_joined() {
    let mut vae = tiny();
    let video = noise([1, 3, 5, 48, 72]);
    let whole = vae.encode(video.clone()).mean;
    vae.tiling = Some(Tiling { tile: (32, 32), stride: (16, 24) });
    let tiled = vae.encode(video.clone()).mean;
    assert_eq!(tiled.dims(), whole.dims());
    // The first tile is blended with nothing.
    let corner = vae.encode(video.narrow(3, 0, 32).narrow(4, 0, 32)).mean;
    let cut = |x: Tensor<5>| x.narrow(3, 0, 2).narrow(4, 0, 3);
    assert!(relative_error(&cut(tiled), &cut(corner)) < 1e-6);
}

#[test]
fn saves_what_it_loads() {
    let folder = tempfile_folder();
    let vae = tiny();
    vae.save(&folder).expect("saved");
    let again = AutoencoderKlWan::load(&folder, &device(), DType::F32).expect("loaded");
    assert_eq!(again.config, vae.config);
    let latents = noise([1, 16, 2, 2, 2]);
    assert_eq!(values(&again.decode(latents.clone())), values(&vae.decode(latents)));
    std::fs::remove_dir_all(folder).expect("removed");
}

fn tempfile_folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("flash-grpo-vae-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("folder");
    folder
}

#[test]
fn refuses_sizes_that_do_not_fit() {
    let check = |json: &str| serde_json::from_str::<VaeConfig>(json).expect("json").check();
    assert!(check("{}").is_ok());
    assert!(VaeConfig::wan22().check().is_ok());
    assert!(check(r#"{"is_residual": true}"#).is_ok());
    assert!(check(r#"{"is_residual": true, "dim_mult": [1, 2, 3, 4]}"#).expect_err("refused").0.contains("level 1"));
    assert!(check(r#"{"is_residual": true, "dim_mult": [1, 1, 1, 2]}"#).expect_err("refused").0.contains("level 3"));
    assert!(check(r#"{"is_residual": true, "attn_scales": [0.5]}"#).expect_err("refused").0.contains("attn_scales"));
    assert!(check(r#"{"patch_size": 2}"#).expect_err("refused").0.contains("in_channels"));
    assert!(check(r#"{"patch_size": 2, "in_channels": 12}"#).expect_err("refused").0.contains("out_channels"));
    assert!(check(r#"{"patch_size": 0}"#).expect_err("refused").0.contains("patch_size"));
    assert!(check(r#"{"patch_size": 400000000000000}"#).expect_err("refused").0.contains("patch_size"));
    assert!(check(r#"{"z_dim": 4}"#).expect_err("refused").0.contains("latents_mean"));
    assert!(check(r#"{"dim_mult": [1, 2]}"#).expect_err("refused").0.contains("temperal_downsample"));
}

/// Reconstruction loss and its gradient for every weight.
fn loss_and_gradients(vae: &AutoencoderKlWan, video: &Tensor<5>) -> (f64, Vec<Vec<f32>>) {
    let input = video.clone().autodiff();
    let latents = vae.encode(input.clone()).mean;
    let loss = (vae.decode_unclamped(latents) - input).powi_scalar(2).mean();
    let value = f64::from(loss.clone().inner().into_scalar::<f32>());
    let grads = loss.backward();
    let of = |slot: &std::sync::Arc<wan::param::Slot>| match slot.leaf().grad(&grads) {
        Some(grad) => grad.into_data().try_into_vec().expect("f32"),
        None => panic!("no gradient for `{}`", slot.name),
    };
    (value, vae.params.iter().map(of).collect())
}

#[test]
fn gradients_reach_every_weight_and_agree_with_differences() {
    let vae = AutoencoderKlWan::random(VaeConfig { base_dim: 8, ..small_config() }, 3, &device()).expect("config");
    vae.params.set_trainable(true);
    let video = noise([2, 3, 5, 16, 16]);
    let (_, grads) = loss_and_gradients(&vae, &video);
    let start = vae.params.snapshot();
    // One step along the gradient of each weight changes the loss by |g|^2 times the step.
    let mut checked = 0;
    for (i, slot) in vae.params.iter().enumerate() {
        let norm2: f64 = grads[i].iter().map(|g| f64::from(*g).powi(2)).sum();
        let at = |t: f64| {
            let step = (t / norm2.sqrt()) as f32;
            let direction: Tensor<1> = Tensor::from_data(grads[i].as_slice(), &device());
            slot.set_value(start[i].clone() + direction * step);
            let loss = loss(&vae, &video);
            slot.set_value(start[i].clone());
            loss
        };
        if norm2.sqrt() < 1e-3 {
            continue;
        }
        let (h, slope) = (2.5e-4, norm2.sqrt());
        let central = |h: f64| (at(h) - at(-h)) / (2.0 * h);
        let measured = (4.0 * central(h) - central(2.0 * h)) / 3.0;
        assert!((measured / slope - 1.0).abs() < 0.03, "{}: {measured:.3e} measured, {slope:.3e} computed", slot.name);
        checked += 1;
    }
    assert!(checked > grads.len() / 2, "{checked} of {}", grads.len());
}

fn loss(vae: &AutoencoderKlWan, video: &Tensor<5>) -> f64 {
    let decoded = vae.decode_unclamped(vae.encode(video.clone()).mean);
    let squared = values(&(decoded - video.clone()).powi_scalar(2));
    squared.iter().map(|v| f64::from(*v)).sum::<f64>() / squared.len() as f64
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let vae = AutoencoderKlWan::random(VaeConfig { base_dim: 8, ..small_config() }, 3, &device()).expect("config");
    vae.params.set_trainable(true);
    let video = noise([3, 3, 5, 16, 24]);
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| loss_and_gradients(&vae, &video))
    };
    let one = with(1);
    assert!(one == with(2) && one == with(5));
}

/// A convolution and the tensors it works on.
#[derive(Debug, Clone)]
struct Case {
    x: [usize; 5],
    outputs: usize,
    kernel: [usize; 3],
    geometry: Geometry,
    activated: bool,
    residual: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let axis = (1..=3usize, 1..=2usize).prop_flat_map(|(k, stride)| (Just(k), Just(stride), 0..k, 0..k));
    let sizes = (1..=3usize, 2..=11usize, 1..=4usize, 1..=9usize, 1..=20usize);
    let case = (sizes, 1..=11usize, [axis.clone(), axis.clone(), axis], 1..=2usize, any::<[bool; 2]>());
    case.prop_filter_map("the kernel fits", |((b, c, f, h, w), outputs, axes, enlarge, [activated, residual])| {
        let size = [f, h * enlarge, w * enlarge];
        let fits = (0..3).all(|i| axes[i].0 <= size[i] + axes[i].2 + axes[i].3);
        let geometry = Geometry { stride: axes.map(|a| a.1), padding: axes.map(|a| (a.2, a.3)), enlarge };
        let activated = activated && enlarge == 1;
        fits.then(|| Case { x: [b, c, f, h, w], outputs, kernel: axes.map(|a| a.0), geometry, activated, residual })
    })
}

type Convolution = fn(Tensor<5>, Tensor<5>, Tensor<1>, Geometry, Fusion) -> Tensor<5>;

/// Output, and the gradients of x, weight, bias, gain and residual, for a loss whose gradient is `upstream`.
fn convolve(case: &Case, inputs: &[Tensor<1>], convolution: Convolution) -> Vec<Vec<f32>> {
    let leaves: Vec<Tensor<1>> = inputs.iter().map(|t| t.clone().autodiff().require_grad()).collect();
    let [_, channels, ..] = case.x;
    let [kt, kh, kw] = case.kernel;
    let weight = leaves[1].clone().reshape([case.outputs, channels, kt, kh, kw]);
    let out = output_dims(case);
    let gain = case.activated.then(|| leaves[3].clone());
    let residual = case.residual.then(|| leaves[4].clone().reshape(out));
    let fusion = Fusion { gain, residual };
    let y = convolution(leaves[0].clone().reshape(case.x), weight, leaves[2].clone(), case.geometry, fusion);
    assert_eq!(y.dims(), out);
    let mut results = vec![values(&y)];
    let grads = (y * inputs[5].clone().reshape(out)).sum().backward();
    let used = [true, true, true, case.activated, case.residual];
    for (leaf, _) in leaves.iter().zip(used).filter(|(_, used)| *used) {
        let grad = leaf.grad(&grads).expect("a gradient");
        results.push(grad.into_data().try_into_vec().expect("f32"));
    }
    results
}

fn output_dims(case: &Case) -> [usize; 5] {
    let [b, _, f, h, w] = case.x;
    let size = [f, h * case.geometry.enlarge, w * case.geometry.enlarge];
    let out = |i: usize| {
        let (before, after) = case.geometry.padding[i];
        (size[i] + before + after - case.kernel[i]) / case.geometry.stride[i] + 1
    };
    [b, case.outputs, out(0), out(1), out(2)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn our_convolution_and_its_gradients_equal_the_engines(case in cases()) {
        let count = |dims: &[usize]| dims.iter().product::<usize>();
        let out = count(&output_dims(&case));
        let weight = case.outputs * case.x[1] * count(&case.kernel);
        let sizes = [count(&case.x), weight, case.outputs, case.x[1], out, out];
        let inputs = sizes.map(|size| noise([size]));
        let ours = convolve(&case, &inputs, conv3d);
        let engines = convolve(&case, &inputs, conv3d_of_engine);
        let scale = |v: &[f32]| v.iter().fold(1e-3_f32, |m, v| m.max(v.abs()));
        for (which, (ours, engines)) in ours.iter().zip(&engines).enumerate() {
            prop_assert_eq!(ours.len(), engines.len());
            let error = ours.iter().zip(engines).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / scale(engines);
            prop_assert!(error < 1e-4, "result {}: {:e}", which, error);
        }
    }
}

/// Multiply-adds, counted as two, of the convolutions of a clip of 9 frames of 64x64: (encode, decode).
fn flops(config: &VaeConfig) -> (f64, f64) {
    let conv = |i: usize, o: usize, taps: usize, positions: usize| (2 * i * o * taps * positions) as f64;
    let residual = |i: usize, o: usize, p: usize| conv(i, o, 27, p) + conv(o, o, 27, p) + if i == o { 0.0 } else { conv(i, o, 1, p) };
    let middle = |c: usize, p: usize| 2.0 * residual(c, c, p) + conv(c, 4 * c, 1, p);
    let (base, last) = (config.base_dim, config.dim_mult.len() - 1);
    let (mut side, mut frames, mut channels) = (64, 9, base);
    let mut encode = conv(3, base, 27, frames * side * side);
    let mut decode = conv(base, 3, 27, frames * side * side);
    for (level, mult) in config.dim_mult.iter().enumerate() {
        let outputs = base * mult;
        for _ in 0..config.num_res_blocks {
            encode += residual(channels, outputs, frames * side * side);
            channels = outputs;
        }
        decode += config.num_res_blocks as f64 * residual(outputs, outputs, frames * side * side);
        let from_below = if level == last { outputs } else { base * config.dim_mult[level + 1] / 2 };
        decode += residual(from_below, outputs, frames * side * side);
        if level == last {
            break;
        }
        let above = base * config.dim_mult[level + 1];
        decode += conv(above, above / 2, 9, frames * side * side);
        side /= 2;
        encode += conv(outputs, outputs, 9, frames * side * side);
        if config.temperal_downsample[level] {
            frames = frames.div_ceil(2);
            encode += conv(outputs, outputs, 3, (frames - 1) * side * side);
            decode += conv(above, 2 * above, 3, (frames - 1) * side * side);
        }
    }
    let p = frames * side * side;
    let z = config.z_dim;
    (encode + middle(channels, p) + conv(channels, 2 * z, 27, p), decode + middle(channels, p) + conv(z, channels, 27, p))
}

/// Seconds of processor time of this process, all threads.
fn processor_time() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields = stat.rsplit(')').next().map(|rest| rest.split_whitespace().collect::<Vec<_>>()).expect("fields");
    let ticks = |i: usize| fields[i].parse::<f64>().expect("ticks");
    (ticks(11) + ticks(12)) / 100.0
}

/// `cargo test --release -p wan --test vae -- --ignored speed --nocapture`
#[test]
#[ignore = "a measurement"]
#[allow(clippy::print_stderr)]
fn speed() {
    const BATCH: usize = 16;
    /// Wall and processor milliseconds per clip.
    fn measure(mut f: impl FnMut()) -> (f64, f64) {
        f();
        let (start, processor, mut best, mut runs) = (std::time::Instant::now(), processor_time(), f64::INFINITY, 0.0);
        while runs < 3.0 || start.elapsed().as_secs_f64() < 2.0 {
            let start = std::time::Instant::now();
            f();
            best = start.elapsed().as_secs_f64().min(best);
            runs += 1.0;
        }
        let per_clip = 1e3 / BATCH as f64;
        (best * per_clip, (processor_time() - processor) / runs * per_clip)
    }
    eprintln!("64x64x9, batch {BATCH}; ms per clip: wall, processor (GFLOP/s of the convolutions)");
    for (base_dim, num_res_blocks) in [(8, 1), (8, 2), (16, 1), (16, 2)] {
        let config = VaeConfig { base_dim, num_res_blocks, ..VaeConfig::default() };
        let (down, up) = flops(&config);
        let vae = AutoencoderKlWan::random(config, 1, &device()).expect("config");
        let video = noise([BATCH, 3, 9, 64, 64]);
        let latents = vae.encode(video.clone()).mean;
        let encode = measure(|| drop(vae.encode(video.clone()).mean.into_data()));
        let decode = measure(|| drop(vae.decode_to_frames(latents.clone()).into_data()));
        vae.params.set_trainable(true);
        let train = measure(|| drop(loss_and_gradients(&vae, &video)));
        let text = |(wall, cpu): (f64, f64), flops: f64| format!("{wall:.1} {cpu:.1} ({:.0})", flops / wall * 1e-6);
        eprintln!(
            "base {base_dim} blocks {num_res_blocks}: encode {}, decode {}, train {}; {} parameters",
            text(encode, down),
            text(decode, up),
            text(train, 3.0 * (down + up)),
            vae.params.num_elements()
        );
    }
}

/// As [`speed`], for the layers of the decoder with 8 channels: forward, and forward with all gradients.
#[test]
#[ignore = "a measurement"]
#[allow(clippy::print_stderr)]
fn speed_of_convolutions() {
    eprintln!("GFLOP/s of conv(silu(norm(x))), ours / engine's: forward, with gradients");
    for (channels, outputs, side, frames) in [(8, 8, 64, 9), (16, 16, 32, 9), (32, 32, 16, 5), (32, 32, 8, 3), (8, 3, 64, 9)] {
        let geometry = Geometry { stride: [1; 3], padding: [(2, 0), (1, 1), (1, 1)], enlarge: 1 };
        let x = [4, channels, frames, side, side];
        let case = Case { x, outputs, kernel: [3; 3], geometry, activated: true, residual: false };
        let out = output_dims(&case).iter().product();
        let sizes = [x.iter().product(), outputs * channels * 27, outputs, channels, out, out];
        let inputs = sizes.map(|size| noise([size]));
        let flops = (2 * 27 * channels * out) as f64;
        let rate = |convolution: Convolution| {
            let best = |f: &mut dyn FnMut()| {
                let time = |f: &mut dyn FnMut()| {
                    let start = std::time::Instant::now();
                    f();
                    start.elapsed().as_secs_f64()
                };
                (0..10).map(|_| time(f)).fold(f64::INFINITY, f64::min)
            };
            let weight = inputs[1].clone().reshape([outputs, channels, 3, 3, 3]);
            let forward = best(&mut || {
                let fusion = Fusion { gain: Some(inputs[3].clone()), residual: None };
                let x = inputs[0].clone().reshape(x);
                drop(convolution(x, weight.clone(), inputs[2].clone(), geometry, fusion));
            });
            let both = best(&mut || drop(convolve(&case, &inputs, convolution)));
            [flops / forward * 1e-9, 3.0 * flops / both * 1e-9]
        };
        let (ours, engines) = (rate(conv3d), rate(conv3d_of_engine));
        eprintln!("{channels}->{outputs} {side}x{side}x{frames}: {:.0} / {:.0}, {:.0} / {:.0}", ours[0], engines[0], ours[1], engines[1]);
    }
}
