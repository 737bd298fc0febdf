//! The scales of an adapter's layers, which a file may tell one by one.

use burn::tensor::{DType, Device};
use serde_json::json;
use std::path::Path;
use wan::lora::{self, AdapterFile};
use wan::transformer::WanTransformer;
use wan::weights::{WeightFiles, write_safetensors};

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden")
}

fn model() -> WanTransformer {
    WanTransformer::load(&golden().join("wan-tiny/transformer"), &Device::flex(), DType::F32).expect("model")
}

/// PEFT's adapter, of rank 4, with other alphas.
fn with_alphas(model: &WanTransformer, alpha: f64, patterns: serde_json::Value) -> AdapterFile {
    let (original, folder) = (golden().join("lora/peft"), tempfile::tempdir().expect("folder"));
    let (weights, config) = ("adapter_model.safetensors", folder.path().join("adapter_config.json"));
    std::fs::copy(original.join(weights), folder.path().join(weights)).expect("copied");
    std::fs::write(config, json!({ "lora_alpha": alpha, "alpha_pattern": patterns }).to_string()).expect("written");
    lora::load(folder.path(), &model.linears).unwrap_or_else(|e| panic!("{e}"))
}

/// The file of a PEFT folder has its scale in the config beside it.
#[test]
fn peft_weights_are_read_with_their_config() {
    let (model, folder) = (model(), golden().join("lora/peft"));
    let read = |path: &Path| lora::load(path, &model.linears);
    let (whole, file) = (read(&folder).expect("folder"), read(&folder.join("adapter_model.safetensors")).expect("file"));
    assert_eq!((whole.config, whole.tensors), (file.config, file.tensors));
    let alone = tempfile::tempdir().expect("folder");
    let path = alone.path().join("renamed.safetensors");
    std::fs::copy(folder.join("adapter_model.safetensors"), &path).expect("copied");
    let message = read(&path).map(drop).expect_err("no alpha").to_string();
    assert!(message.contains("no `adapter_config.json`"), "{message}");
}

#[test]
fn alpha_0_switches_a_layer_off_and_no_other() {
    let model = model();
    let (on, off) = (with_alphas(&model, 8.0, json!({})), with_alphas(&model, 8.0, json!({ "blocks.0.attn1.to_k": 0 })));
    assert_eq!(off.tensors[0].0, "blocks.0.attn1.to_k", "the first layer");
    assert!(on.tensors[0].2.iter().any(|&b| b != 0.0) && off.tensors[0].2.iter().all(|&b| b == 0.0));
    assert_eq!(off.config, on.config);
    assert_eq!(off.tensors[1..], on.tensors[1..]);
    let none = with_alphas(&model, 0.0, json!({}));
    assert_eq!(none.config.alpha, 4.0);
    assert!(none.tensors.iter().all(|(_, _, b)| b.iter().all(|&b| b == 0.0)));
}

#[test]
fn an_alpha_that_is_not_finite_is_refused() {
    let (model, folder) = (model(), tempfile::tempdir().expect("folder"));
    let files = WeightFiles::open_file(&golden().join("lora/comfyui_diffusion_model_alpha.safetensors")).expect("file");
    let path = folder.path().join("adapter.safetensors");
    for alpha in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let value =
            |name: &str| if name.ends_with("blocks.1.self_attn.q.alpha") { vec![alpha] } else { files.floats(name).expect("values") };
        let tensors = files.names().map(|name| (name.to_owned(), (files.shape(name).expect("shape"), value(name))));
        write_safetensors(&path, &tensors.collect(), None).expect("written");
        let message = lora::load(&path, &model.linears).map(drop).expect_err("refused").to_string();
        assert!(message.contains(&format!("layer `blocks.1.attn1.to_q` has alpha {alpha}")) && message.contains("hint:"), "{message}");
    }
}
