//! Model folders with random weights have the names and shapes of the real ones, and load.

mod common;

use burn::tensor::{DType, Device, Tensor};
use common::golden_dir;
use std::collections::BTreeMap;
use std::path::Path;
use wan::experts::Boundary;
use wan::pipeline::{SampleRequest, WanPipeline};
use wan::random_model::{Part, RandomModel};
use wan::transformer::{TransformerConfig, WanTransformer};
use wan::umt5::Umt5Config;
use wan::vae::VaeConfig;
use wan::weights::{Declared, WeightFiles, to_floats};

fn model(transformer: TransformerConfig, vae: VaeConfig, text_encoder: Umt5Config, shard_bytes: u64) -> RandomModel {
    RandomModel {
        transformer,
        boundary: None,
        vae,
        text_encoder,
        words: vec![],
        parts: vec![Part::Transformer, Part::Vae, Part::TextEncoder],
        seed: 3,
        shard_bytes,
    }
}

fn released(transformer: TransformerConfig) -> RandomModel {
    model(transformer, VaeConfig::default(), Umt5Config::xxl(), 1 << 30)
}

fn published(name: &str) -> BTreeMap<String, Vec<usize>> {
    let path = golden_dir().join("real").join(format!("{name}.shapes.json"));
    serde_json::from_str(&std::fs::read_to_string(path).expect("readable")).expect("names and shapes")
}

fn shapes(declared: Vec<Declared>) -> BTreeMap<String, Vec<usize>> {
    declared.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

#[test]
fn names_and_shapes_are_those_of_the_released_models() {
    for (transformer, name, parameters) in [
        (TransformerConfig::wan21_1_3b(), "wan2.1-t2v-1.3b.transformer", 1_418_996_800),
        (TransformerConfig::wan21_14b(), "wan2.1-t2v-14b.transformer", 14_288_491_584),
    ] {
        let model = released(transformer);
        assert_eq!(shapes(model.declared(Part::Transformer).expect("declared")), published(name));
        assert_eq!(model.transformer.num_parameters(), parameters);
    }
    let model = released(TransformerConfig::wan21_1_3b());
    assert_eq!(shapes(model.declared(Part::Vae).expect("declared")), published("wan2.1.vae"));
    let model = self::model(TransformerConfig::wan22_ti2v_5b(), VaeConfig::wan22(), Umt5Config::xxl(), 1 << 30);
    assert_eq!(shapes(model.declared(Part::Vae).expect("declared")), published("wan2.2-ti2v-5b.vae"));
    assert_eq!(model.transformer.num_parameters(), 4_999_787_712);
    // the embedding has two names in the list, for the same values
    let mut text = published("umt5-xxl-encoder");
    text.remove("encoder.embed_tokens.weight").expect("second name");
    assert_eq!(shapes(model.declared(Part::TextEncoder).expect("declared")), text);
    assert_eq!(model.text_encoder.num_parameters(), 5_680_910_336);
}

/// The sizes of wan-tiny, with a vocabulary for the stand-in tokenizer.
fn tiny(shard_bytes: u64) -> RandomModel {
    let dir = golden_dir().join("wan-tiny");
    let transformer = TransformerConfig::load(&dir.join("transformer/config.json")).expect("config");
    let vae = VaeConfig::read(&dir.join("vae/config.json")).expect("config");
    let text = Umt5Config::load(&dir.join("text_encoder")).expect("config");
    model(transformer, vae, text, shard_bytes)
}

fn write(model: &RandomModel) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temporary folder");
    let mut written = 0;
    model.write(dir.path(), &mut |bytes| written += bytes).expect("writes");
    assert_eq!(written, model.bytes().expect("size"));
    dir
}

fn files(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).expect("folder").map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_folder_loads_whatever_its_shards() {
    let (whole, cut) = (write(&tiny(u64::MAX)), write(&tiny(50_000)));
    assert_eq!(files(&whole.path().join("transformer")), ["config.json", "diffusion_pytorch_model.safetensors"]);
    let shards = files(&cut.path().join("transformer"));
    assert!(shards.len() > 4 && shards[1].starts_with("diffusion_pytorch_model-00001-of-0000"), "{shards:?}");
    let open =
        |dir: &tempfile::TempDir| WeightFiles::open_folder(&dir.path().join("transformer"), "diffusion_pytorch_model").expect("opens");
    let (one, many) = (open(&whole), open(&cut));
    for name in one.names() {
        assert_eq!(one.floats(name).expect("values"), many.floats(name).expect("values"), "{name}");
    }
    let pipeline = WanPipeline::load(cut.path(), &Device::flex(), DType::F32).expect("loads");
    let text = pipeline.text_encoder.encode(&["a b"], 16).expect("encodes");
    let latents: Tensor<5> = Tensor::ones([1, 16, 1, 4, 4], &Device::flex());
    let velocity = pipeline.transformer.forward(latents, &[500.0], &pipeline.transformer.text_context(&text, false));
    let values = velocity.into_data().iter::<f32>().collect::<Vec<_>>();
    assert!(values.iter().all(|v| v.is_finite() && v.abs() < 100.0) && values.iter().any(|v| *v != 0.0), "{values:?}");
}

/// Wan2.2 TI2V-5B in small: its autoencoder, and a timestep for every token.
#[test]
fn a_folder_of_wan22_samples_a_video() {
    let vae = VaeConfig::read(&golden_dir().join("wan22-vae-tiny/config.json")).expect("config");
    let tiny = tiny(u64::MAX);
    let transformer = TransformerConfig { in_channels: vae.z_dim, out_channels: vae.z_dim, ..tiny.transformer.clone() };
    let dir = write(&RandomModel { transformer, vae, ..tiny });
    let index = std::fs::read_to_string(dir.path().join("model_index.json")).expect("readable");
    assert!(index.contains("\"expand_timesteps\": true"), "{index}");
    let pipeline = WanPipeline::load(dir.path(), &Device::flex(), DType::F32).expect("loads");
    let request =
        SampleRequest { prompt: "a".into(), height: 32, width: 64, num_frames: 5, num_inference_steps: 2, ..SampleRequest::default() };
    let sample = pipeline.sample(&request, &mut |_, _| {}).expect("samples");
    assert_eq!((sample.latents.dims(), sample.frames.dims()), ([1, 6, 2, 2, 4], [1, 3, 5, 32, 64]));
    let odd = pipeline.sample(&SampleRequest { height: 48, ..request }, &mut |_, _| {}).expect_err("16 times a patch of 2").to_string();
    assert!(odd.contains("32"), "{odd}");
}

#[test]
fn a_folder_of_two_networks_loads() {
    let parts = vec![Part::Transformer, Part::Transformer2, Part::Vae, Part::TextEncoder];
    let dir = write(&RandomModel { boundary: Some(Boundary::T2V_A14B), parts, ..tiny(u64::MAX) });
    let pipeline = WanPipeline::load(dir.path(), &Device::flex(), DType::F32).expect("loads");
    assert_eq!(pipeline.experts().boundary(), Some(Boundary::T2V_A14B));
    let weights: Vec<Vec<f32>> = pipeline.experts().networks().map(|network| to_floats(network.params.snapshot()[0].clone())).collect();
    assert_eq!(weights[0].len(), weights[1].len());
    assert_ne!(weights[0], weights[1]);
    // the first is what it would be alone
    let single = WanPipeline::load(write(&tiny(u64::MAX)).path(), &Device::flex(), DType::F32).expect("loads");
    assert_eq!(weights[0], to_floats(single.transformer.params.snapshot()[0].clone()));
    assert!(single.second.is_none());
}

#[test]
fn nothing_is_overwritten() {
    let dir = write(&tiny(u64::MAX));
    let error = tiny(u64::MAX).write(dir.path(), &mut |_| {}).expect_err("refused").to_string();
    assert!(error.contains("the folder is not empty"), "{error}");
}

/// A folder that was being written when the program was killed is not taken for a whole one, and is made anew.
#[test]
fn a_folder_has_its_name_once_it_is_whole() {
    let (model, parent) = (tiny(u64::MAX), tempfile::tempdir().expect("temporary folder"));
    let dir = parent.path().join("new");
    let (mut written, total) = (0, model.bytes().expect("size"));
    model
        .write(&dir, &mut |bytes| {
            written += bytes;
            assert!(!dir.exists(), "{written} of {total} bytes");
        })
        .expect("writes");
    assert_eq!((written, files(parent.path())), (total, vec!["new".to_owned()]));
    std::fs::rename(&dir, parent.path().join(".writing-new")).expect("as a killed program leaves it");
    model.write(&dir, &mut |_| {}).expect("writes");
    assert_eq!(files(parent.path()), ["new"]);
}

/// Values come straight from the map: as f32 they are what a detour over the file's dtype gives.
#[test]
fn values_are_converted_exactly() {
    let dir = write(&tiny(u64::MAX));
    let files = WeightFiles::open_folder(&dir.path().join("transformer"), "diffusion_pytorch_model").expect("opens");
    for name in files.names() {
        let direct = files.data_as(name, DType::F32).expect("values").iter::<f32>().collect::<Vec<_>>();
        assert_eq!(direct, files.floats(name).expect("values"), "{name}");
        let middle = direct.len() / 2;
        assert_eq!(files.floats_of(name, middle..direct.len()).expect("part"), direct[middle..], "{name}");
        assert!(files.floats_of(name, 0..direct.len() + 1).is_err());
    }
    let model = WanTransformer::load(&dir.path().join("transformer"), &Device::flex(), DType::BF16).expect("loads as bf16");
    assert_eq!(model.dtype(), DType::BF16);
}
