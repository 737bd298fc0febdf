//! Model folders and adapters from strangers: whatever is in them, opening them is an error or works; it never panics, and never
//! asks for memory that the file does not justify.
//!
//! `FLASH_GRPO_FUZZ_SECONDS=600 cargo test --release -p wan --test hostile` spends that long on each parser.

#[path = "common/folder.rs"]
mod folder;

use burn::tensor::{DType, Device};
use folder::copy;
use grpo::random::{Key, Purpose, index_below};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wan::pipeline::WanPipeline;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden")
}

/// The project's own generator, from a seed.
struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Self(Key { seed, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.rng())
    }

    fn below(&mut self, n: usize) -> usize {
        index_below(&mut self.0, n)
    }
}

/// Replaces one value somewhere in `json`.
fn spoil(json: &mut Value, random: &mut Random) {
    let deeper = random.below(4) > 0;
    match json {
        Value::Object(map) if deeper && !map.is_empty() => {
            let at = random.below(map.len());
            match map.values_mut().nth(at) {
                Some(value) if random.below(8) > 0 => spoil(value, random),
                _ => drop(map.keys().nth(at).cloned().and_then(|key| map.remove(&key))),
            }
        }
        Value::Array(items) if deeper && !items.is_empty() => {
            let at = random.below(items.len());
            spoil(&mut items[at], random);
        }
        value => {
            let values = [
                json!(0),
                json!(-1),
                json!(1),
                json!(3),
                json!(7),
                json!(1e308),
                json!(9_007_199_254_740_993_u64),
                json!(u64::MAX),
                json!(1_000_000_007),
                json!("x"),
                json!(""),
                json!(null),
                json!([]),
                json!({}),
                json!(true),
                json!([0, 0, 0]),
                json!(0.5),
            ];
            *value = values[random.below(values.len())].clone();
        }
    }
}

/// Calls `work` with 0, 1, 2, .. `count` times, or for as long as the environment says.
fn repeatedly(count: usize, mut work: impl FnMut(usize)) {
    let seconds = std::env::var("FLASH_GRPO_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(0));
    let mut done = 0;
    while done < count || Instant::now() < end {
        work(done);
        done += 1;
    }
}

/// Calls `open` and wants no panic; returns whether it worked.
#[track_caller]
fn survives<T>(what: &str, open: impl FnOnce() -> wan::Result<T>) -> bool {
    match catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => {
            let message = error.to_string();
            assert!(message.contains("hint: "), "{what}: no hint in `{message}`");
            false
        }
        Err(_) => panic!("{what} made it panic"),
    }
}

#[test]
fn spoiled_configs_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    copy(&golden().join("wan-tiny"), folder.path());
    let files =
        ["transformer/config.json", "vae/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json", "model_index.json"];
    let mut random = Random::new(1);
    let mut refused = 0;
    repeatedly(200, |round| {
        let path = folder.path().join(files[round % files.len()]);
        let original = std::fs::read_to_string(&path).expect("config");
        let mut json: Value = serde_json::from_str(&original).expect("JSON");
        spoil(&mut json, &mut random);
        std::fs::write(&path, json.to_string()).expect("write");
        let load = || WanPipeline::load(folder.path(), &Device::flex(), DType::F32);
        refused += usize::from(!survives(&format!("{}: {json}", path.display()), load));
        std::fs::write(&path, original).expect("write");
    });
    assert!(refused > 60, "{refused} refused");
}

/// Sizes that no file justifies: known from the header, before anything of them is made.
#[test]
fn a_config_beyond_its_weights_allocates_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    copy(&golden().join("wan-tiny"), folder.path());
    let edit = |file: &str, sizes: &[(&str, Value)]| {
        let path = folder.path().join(file);
        let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("config")).expect("JSON");
        sizes.iter().for_each(|(key, size)| json[*key] = size.clone());
        std::fs::write(&path, json.to_string()).expect("write");
    };
    let (most, device) = (1 << 20, Device::flex());
    let transformer = || wan::transformer::WanTransformer::load(&folder.path().join("transformer"), &device, DType::F32).map(drop);
    let vae = || wan::vae::AutoencoderKlWan::load(&folder.path().join("vae"), &device, DType::F32).map(drop);
    let text = || wan::umt5::Umt5Encoder::load(&folder.path().join("text_encoder"), &device, DType::F32).map(drop);
    let refused = |opened: wan::Result<()>| opened.expect_err("refused").to_string();
    edit("transformer/config.json", &[("num_attention_heads", json!(1024)), ("attention_head_dim", json!(most)), ("ffn_dim", json!(most))]);
    let message = refused(transformer());
    assert!(message.contains("patch_embedding.weight: expected [1073741824, 16, 1, 2, 2], got"), "{message}");
    edit("transformer/config.json", &[("num_layers", json!(1024))]);
    let message = refused(transformer());
    assert!(message.contains("blocks.2.scale_shift_table"), "{message}");
    edit("transformer/config.json", &[("patch_size", json!([most, most, most]))]);
    let message = refused(transformer());
    assert!(message.contains("`patch_size` is [1048576, 1048576, 1048576]"), "{message}");
    edit("vae/config.json", &[("base_dim", json!(most))]);
    let message = refused(vae());
    assert!(message.contains("conv1.weight: expected [1048576, 1048576, 3, 3, 3], got"), "{message}");
    edit("text_encoder/config.json", &[("d_model", json!(most)), ("d_ff", json!(most))]);
    let message = refused(text());
    assert!(message.contains(", 1048576], got"), "{message}");
}

#[test]
fn spoiled_tokenizers_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    let original: Value =
        serde_json::from_str(&std::fs::read_to_string(golden().join("wan-tiny/tokenizer/tokenizer.json")).expect("file")).expect("JSON");
    let mut random = Random::new(2);
    repeatedly(60, |_| {
        let mut json = original.clone();
        spoil(&mut json, &mut random);
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).expect("write");
        survives("tokenizer.json", || wan::text::PromptTokenizer::load(folder.path())?.encode("a red fox", 16));
    });
}

/// Flips bits of the header, cuts the file, lies about the header's length.
fn spoil_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    let header = 8 + u64::from_le_bytes(std::array::from_fn(|i| bytes[i])) as usize;
    match random.below(4) {
        0 => bytes.truncate(random.below(bytes.len())),
        1 => bytes[random.below(8)] = random.below(256) as u8,
        2 => bytes.extend(vec![0; 1 + random.below(64)]),
        _ => (0..1 + random.below(3)).for_each(|_| bytes[8 + random.below(header - 8)] ^= 1 << random.below(7)),
    }
}

#[test]
fn spoiled_weights_and_adapters_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    let adapter = std::fs::read(golden().join("lora/peft/adapter_model.safetensors")).expect("adapter");
    let path = folder.path().join("adapter_model.safetensors");
    copy(&golden().join("lora/peft"), folder.path());
    let model = wan::transformer::WanTransformer::load(&golden().join("wan-tiny/transformer"), &Device::flex(), DType::F32).expect("model");
    let mut random = Random::new(3);
    repeatedly(200, |_| {
        let mut bytes = adapter.clone();
        spoil_bytes(&mut bytes, &mut random);
        std::fs::write(&path, bytes).expect("write");
        survives("adapter", || wan::lora::load(folder.path(), &model.linears)?.attach(&model.linears, &Device::flex()).map(drop));
        wan::lora::Lora::detach(&model.linears);
    });
}

/// Matrices without elements, as many rows and columns as there are.
#[test]
fn adapters_of_nothing_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("adapter.safetensors");
    let model = wan::transformer::WanTransformer::load(&golden().join("wan-tiny/transformer"), &Device::flex(), DType::F32).expect("model");
    let site = model.linears.iter().find(|site| site.name == "blocks.0.attn1.to_q").expect("layer");
    let (inputs, outputs, many) = (site.in_features, site.out_features, 1 << 62);
    let pair = |layer: &str, a: [usize; 2], b: [usize; 2]| {
        let tensor = |end: &str, shape: [usize; 2]| (format!("{layer}.{end}.weight"), (shape.to_vec(), vec![0.5; shape[0] * shape[1]]));
        [tensor("lora_A", a), tensor("lora_B", b)]
    };
    let sound = pair("blocks.0.attn1.to_k", [4, inputs], [outputs, 4]);
    for (a, b) in [([many, 0], [0, many]), ([0, many], [many, 0]), ([4, 0], [0, 4]), ([0, inputs], [outputs, 0]), ([2, inputs], [0, 2])] {
        let spoiled = pair("blocks.0.attn1.to_q", a, b);
        for tensors in [BTreeMap::from(spoiled.clone()), spoiled.into_iter().chain(sound.clone()).collect()] {
            wan::weights::write_safetensors(&path, &tensors, None).expect("written");
            let load = || wan::lora::load(&path, &model.linears).map(drop);
            assert!(!survives(&format!("A {a:?}, B {b:?}"), load), "A {a:?}, B {b:?}");
            let message = load().expect_err("refused").to_string();
            assert!(message.contains(&format!("`blocks.0.attn1.to_q` has A {a:?} and B {b:?}")), "{message}");
        }
    }
    let config = wan::lora::LoraConfig { rank: many, alpha: 1.0, target_modules: vec![], init: Default::default() };
    let attach = || {
        let tensors = vec![(site.name.clone(), vec![], vec![])];
        wan::lora::Lora::attach_values(&model.linears, &config, tensors, &Device::flex())
    };
    assert!(!survives("rank 2^62", attach));
}

/// Known from the header too: a text encoder is read layer by layer, long after it was opened.
#[test]
fn elements_that_cannot_be_read_are_known_at_once() {
    let folder = tempfile::tempdir().expect("folder");
    let (device, name) = (Device::flex(), "encoder.block.1.layer.0.SelfAttention.q.weight");
    let encoder = folder.path().join("text_encoder");
    copy(&golden().join("wan-tiny/text_encoder"), &encoder);
    let path = encoder.join("model.safetensors");
    let bytes = std::fs::read(&path).expect("weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("weights");
    let small = vec![0; tensors.tensor(name).expect("tensor").shape().iter().product()];
    let narrowed = tensors.iter().map(|(of, view)| match of == name {
        true => (of, TensorView::new(Dtype::F8_E4M3, view.shape().to_vec(), &small).expect("view")),
        false => (of, view),
    });
    serialize_to_file(narrowed, None, &path).expect("written");
    let load = || wan::umt5::Umt5Encoder::load(&encoder, &device, DType::F32).map(drop);
    let in_stages = || wan::umt5::encode_in_stages(&encoder, &[vec![5, 1]], &device, &mut |_, _| {}).map(drop);
    assert!(!survives("held in memory", load) && !survives("in stages", in_stages));
    for message in [load(), in_stages()].map(|opened| opened.expect_err("refused").to_string()) {
        let says = |part: &str| message.contains(part);
        assert!(says("model.safetensors") && says(&format!("{name}: F8_E4M3")) && says("hint: f32, f16 and bf16"), "{message}");
        assert!(!says("missing") && !says("wrong shape") && !says("unexpected"), "{message}");
    }
}

#[test]
fn shards_stay_in_their_folder() {
    let folder = tempfile::tempdir().expect("folder");
    copy(&golden().join("wan-tiny/transformer"), folder.path());
    let weights = folder.path().join("diffusion_pytorch_model.safetensors");
    if weights.exists() {
        std::fs::rename(&weights, folder.path().join("part.safetensors")).expect("rename");
    }
    let index = folder.path().join("diffusion_pytorch_model.safetensors.index.json");
    for name in ["../part.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "part.bin", "C:\\part.safetensors"] {
        std::fs::write(&index, json!({ "weight_map": { "proj_out.bias": name } }).to_string()).expect("write");
        let opened = survives(name, || wan::weights::WeightFiles::open_folder(folder.path(), "diffusion_pytorch_model"));
        assert!(!opened, "{name}");
    }
    let deep = format!("{{\"weight_map\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    std::fs::write(&index, deep).expect("write");
    assert!(!survives("nested", || wan::weights::WeightFiles::open_folder(folder.path(), "diffusion_pytorch_model")));
}

/// Found by spoiling files for ten minutes: the library panics at a template that names a token which the file does not define.
#[test]
fn a_template_without_its_token_is_no_panic() {
    let folder = tempfile::tempdir().expect("folder");
    let text = std::fs::read_to_string(golden().join("wan-tiny/tokenizer/tokenizer.json")).expect("file");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    let whole = json.to_string();
    json["post_processor"]["special_tokens"] = json!({});
    let ids = |text: String| {
        std::fs::write(folder.path().join("tokenizer.json"), text).expect("write");
        wan::text::PromptTokenizer::load(folder.path()).and_then(|tokenizer| tokenizer.encode("a red fox", 16)).expect("ids")
    };
    assert_eq!(ids(json.to_string()), ids(whole));
}
