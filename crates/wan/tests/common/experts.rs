//! Model folders with two networks, and such as start with an image, made from one with one.

#![allow(dead_code, reason = "not every test needs all of them")]

#[path = "folder.rs"]
mod folder;

pub use folder::copy;
use std::collections::BTreeMap;
use std::path::Path;
use wan::weights::{WeightFiles, write_safetensors};

/// Every weight of the second network is this times that of the first, rounded to f32: golden/make_wan22.py does the same.
pub const SECOND_IS: f32 = 0.75;

const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

/// A copy of wan-tiny whose network starts with an image: it reads its own channels, the first `mask` of them times 0.7, and all times 0.5, as that of
/// golden/make_i2v_pipeline.py.
pub fn image_to_video(from: &Path) -> tempfile::TempDir {
    const MASK: usize = 4;
    let dir = tempfile::tempdir().expect("temporary folder");
    copy(from, dir.path());
    let index = dir.path().join("model_index.json");
    let text = std::fs::read_to_string(&index).expect("read");
    std::fs::write(&index, text.replace("\"WanPipeline\"", "\"WanImageToVideoPipeline\"")).expect("write");
    let transformer = dir.path().join("transformer");
    let config = std::fs::read_to_string(transformer.join("config.json")).expect("read");
    std::fs::write(transformer.join("config.json"), config.replace("\"in_channels\": 16", "\"in_channels\": 36")).expect("write");
    let files = WeightFiles::open_file(&transformer.join(WEIGHTS)).expect("weights");
    let tensor = |name: &str| {
        let (mut shape, values) = (files.shape(name).expect("shape"), files.floats(name).expect("values"));
        if name != "patch_embedding.weight" {
            return (shape, values);
        }
        let (channels, taps) = (shape[1], shape[2..].iter().product::<usize>());
        let times = |values: &[f32], factor: f32| values.iter().map(|value| factor * value).collect::<Vec<f32>>();
        let row = |own: &[f32]| [own.to_vec(), times(&own[..MASK * taps], 0.7), times(own, 0.5)].concat();
        shape[1] = 2 * channels + MASK;
        (shape, values.chunks_exact(channels * taps).flat_map(row).collect())
    };
    let tensors: BTreeMap<_, _> = files.names().map(|name| (name.to_owned(), tensor(name))).collect();
    write_safetensors(&transformer.join(WEIGHTS), &tensors, None).expect("write");
    dir
}

/// The same whose network attends to the image as well, with an image encoder: as that of golden/make_clip.py.
pub fn image_to_video_with_encoder(golden: &Path) -> tempfile::TempDir {
    let dir = image_to_video(&golden.join("wan-tiny"));
    copy(&golden.join("clip-tiny"), dir.path());
    let transformer = dir.path().join("transformer");
    let config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(transformer.join("config.json")).expect("read")).expect("JSON");
    let files = WeightFiles::open_file(&transformer.join(WEIGHTS)).expect("weights");
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> =
        files.names().map(|name| (name.to_owned(), (files.shape(name).expect("shape"), files.floats(name).expect("values")))).collect();
    let text = tensors["condition_embedder.text_embedder.linear_1.weight"].clone();
    let (dim, features) = (text.0[0], text.0[1]);
    let embedder = "condition_embedder.image_embedder";
    let full = |count: usize, value: f32| (vec![count], vec![value; count]);
    let mut more = vec![
        (format!("{embedder}.norm1.weight"), full(features, 1.0)),
        (format!("{embedder}.norm1.bias"), full(features, 0.0)),
        (format!("{embedder}.ff.net.0.proj.weight"), (vec![features, features], text.1[..features * features].to_vec())),
        (format!("{embedder}.ff.net.0.proj.bias"), full(features, 0.0)),
        (format!("{embedder}.ff.net.2.weight"), text),
        (format!("{embedder}.ff.net.2.bias"), full(dim, 0.0)),
        (format!("{embedder}.norm2.weight"), full(dim, 1.0)),
        (format!("{embedder}.norm2.bias"), full(dim, 0.0)),
    ];
    for (name, (shape, values)) in &tensors {
        let scaled = || (shape.clone(), values.iter().map(|value| 0.6 * value).collect());
        for (own, added) in [(".attn2.to_k.", ".attn2.add_k_proj."), (".attn2.to_v.", ".attn2.add_v_proj.")] {
            if name.contains(own) {
                more.push((name.replace(own, added), scaled()));
            }
        }
        if name.contains(".attn2.norm_k.") {
            more.push((name.replace("norm_k", "norm_added_k"), (shape.clone(), values.clone())));
        }
    }
    tensors.extend(more);
    write_safetensors(&transformer.join(WEIGHTS), &tensors, None).expect("write");
    let mut config = config;
    config["image_dim"] = features.into();
    config["added_kv_proj_dim"] = dim.into();
    std::fs::write(transformer.join("config.json"), config.to_string()).expect("write");
    dir
}

/// A copy of a model folder, whose tokens have timesteps of their own: an image is the first latent frame.
pub fn expanded(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temporary folder");
    copy(from, dir.path());
    let path = dir.path().join("model_index.json");
    let mut index: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("read")).expect("JSON");
    index["expand_timesteps"] = true.into();
    std::fs::write(&path, index.to_string()).expect("write");
    dir
}

/// A copy of a model folder, with a second network below `boundary_ratio`.
pub fn two_experts(from: &Path, boundary_ratio: f64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temporary folder");
    copy(from, dir.path());
    let path = dir.path().join("model_index.json");
    let mut index: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("read")).expect("JSON");
    index["boundary_ratio"] = boundary_ratio.into();
    index["transformer_2"] = serde_json::json!(["diffusers", "WanTransformer3DModel"]);
    std::fs::write(&path, index.to_string()).expect("write");
    let (first, second) = (dir.path().join("transformer"), dir.path().join("transformer_2"));
    std::fs::create_dir(&second).expect("folder");
    std::fs::copy(first.join("config.json"), second.join("config.json")).expect("copy");
    let files = WeightFiles::open_file(&first.join(WEIGHTS)).expect("weights");
    let scaled = |name: &str| files.floats(name).expect("values").into_iter().map(|value| SECOND_IS * value).collect::<Vec<f32>>();
    let tensors: BTreeMap<_, _> = files.names().map(|name| (name.to_owned(), (files.shape(name).expect("shape"), scaled(name)))).collect();
    write_safetensors(&second.join(WEIGHTS), &tensors, None).expect("write");
    dir
}
