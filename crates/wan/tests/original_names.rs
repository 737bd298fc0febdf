//! A transformer under the names of the original release is the same transformer.

mod common;

use burn::tensor::DType;
use common::device::device;
use common::{Golden, golden_dir};
use std::collections::BTreeMap;
use std::path::Path;
use wan::original::original_name;
use wan::text::PromptEmbeds;
use wan::transformer::WanTransformer;
use wan::weights::{WeightFiles, to_floats, write_safetensors};

const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

/// The velocity of golden case b.
fn velocity(dir: &Path) -> wan::Result<Vec<f32>> {
    let (golden, model) = (Golden::open("transformer_forward"), WanTransformer::load(dir, &device(), DType::F32)?);
    let text = PromptEmbeds::from_padded(golden.tensor("b.encoder_hidden_states"));
    let text = model.text_context(&text, false);
    Ok(to_floats(model.forward(golden.tensor("b.hidden_states"), &[999.0, 250.0], &text)))
}

/// A folder with wan-tiny's transformer, its tensors renamed.
fn renamed(name_of: impl Fn(&str) -> String) -> tempfile::TempDir {
    let (from, dir) = (golden_dir().join("wan-tiny/transformer"), tempfile::tempdir().expect("folder"));
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).expect("copy");
    let files = WeightFiles::open_file(&from.join(WEIGHTS)).expect("weights");
    let tensor = |name: &str| (name_of(name), (files.shape(name).expect("shape"), files.floats(name).expect("values")));
    let tensors: BTreeMap<_, _> = files.names().map(tensor).collect();
    assert_eq!(tensors.len(), files.names().count());
    write_safetensors(&dir.path().join(WEIGHTS), &tensors, None).expect("write");
    dir
}

#[test]
fn the_velocity_is_the_same_to_the_last_bit() {
    let reference = velocity(&golden_dir().join("wan-tiny/transformer")).expect("loads");
    for prefix in ["", "diffusion_model.", "model.diffusion_model."] {
        let dir = renamed(|name| format!("{prefix}{}", original_name(name).expect("a name")));
        assert_eq!(velocity(dir.path()).unwrap_or_else(|error| panic!("{error}")), reference, "{prefix}");
    }
}

#[test]
fn strange_names_are_listed() {
    let dir = renamed(|name| match original_name(name).expect("a name") {
        name if name == "blocks.1.ffn.0.bias" => "blocks.1.ffn.7.bias".to_owned(),
        name => name,
    });
    let error = velocity(dir.path()).expect_err("refused").to_string();
    assert!(error.contains("missing (1):\n    blocks.1.ffn.net.0.proj.bias"), "{error}");
    assert!(error.contains("unexpected (1):\n    blocks.1.ffn.7.bias"), "{error}");

    let dir = renamed(|name| match original_name(name).expect("a name") {
        name if name == "blocks.1.ffn.0.bias" => "diffusion_model.blocks.1.ffn.2.bias".to_owned(),
        name => name,
    });
    let error = velocity(dir.path()).expect_err("refused").to_string();
    assert!(error.contains("are both `blocks.1.ffn.net.2.bias`"), "{error}");
}

#[test]
fn pickled_weights_are_never_read() {
    let dir = renamed(str::to_owned);
    std::fs::rename(dir.path().join(WEIGHTS), dir.path().join("model.pth")).expect("rename");
    for error in [velocity(dir.path()).expect_err("refused"), WeightFiles::open_file(&dir.path().join("model.pth")).err().expect("refused")]
    {
        let error = error.to_string();
        assert!(error.contains("model.pth") && error.contains("hint: pickled weights can execute code"), "{error}");
    }
}
