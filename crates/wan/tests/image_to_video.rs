//! The transformers of image-to-video against the public Python implementation (golden/README.md).

mod common;

use burn::tensor::{DType, Tensor};
use common::device::{allowed, device};
use common::{Golden, assert_close, golden_dir, relative_error};
use wan::original::original_name;
use wan::text::PromptEmbeds;
use wan::transformer::{TextContext, TransformerConfig, WanTransformer};
use wan::weights::to_floats;

/// rel = max|a-b| / max|ref| of a forward pass.
const FORWARD: f64 = 5e-6;
/// The same for gradients.
const GRADIENT: f64 = 3e-5;
/// Of sums in another order.
const SUMS: f64 = 1e-6;
const TIMESTEPS: [f64; 2] = [999.0, 250.0];

fn load(folder: &str) -> WanTransformer {
    WanTransformer::load(&golden_dir().join(folder), &device(), DType::F32).unwrap_or_else(|e| panic!("{e}"))
}

/// The reference has the text padded to 512 rows.
fn text(golden: &Golden) -> PromptEmbeds {
    PromptEmbeds { embeds: golden.tensor("text"), lengths: vec![5, 5], padded_length: 512 }
}

fn context(model: &WanTransformer, golden: &Golden, record: bool) -> TextContext {
    model.text_and_image_context(&text(golden), golden.tensor("image"), record)
}

#[test]
fn matches_reference_image_to_video_forward() {
    let golden = Golden::open("i2v");
    let model = load("i2v-tiny");
    let latents: Tensor<5> = golden.tensor("hidden_states");
    assert_close(&golden, "sample", model.forward(latents.clone(), &TIMESTEPS, &context(&model, &golden, false)), FORWARD);
    // the image counts
    let without = model.forward(latents.clone(), &TIMESTEPS, &model.text_context(&text(&golden), false));
    assert!(relative_error(&to_floats(without), &golden.values("sample")) > 0.01);
    // samples can be chosen among texts and images
    let swapped = model.forward(latents.clone().flip([0]), &[TIMESTEPS[1], TIMESTEPS[0]], &context(&model, &golden, false).select(&[1, 0]));
    assert_close(&golden, "sample", swapped.flip([0]), FORWARD);
    // Wan2.2 has no image branch
    let model = load("i2v-tiny-no-image");
    assert_close(&golden, "no_image.sample", model.forward(latents, &TIMESTEPS, &model.text_context(&text(&golden), false)), FORWARD);
}

#[test]
fn matches_reference_image_to_video_gradients() {
    let golden = Golden::open("i2v");
    let model = load("i2v-tiny");
    model.params.set_trainable(true);
    let latents: Tensor<5> = golden.tensor("hidden_states");
    let weight: Tensor<5> = golden.tensor("weight");
    let sample = model.forward(latents.clone().autodiff(), &TIMESTEPS, &context(&model, &golden, true));
    let plain = (sample * weight.clone()).sum().backward();
    let (velocity, trace) = model.forward_traced(latents, &TIMESTEPS, &context(&model, &golden, false));
    assert_close(&golden, "sample", velocity, FORWARD);
    let mut recomputed: Vec<Option<Tensor<1>>> = vec![None; model.params.len()];
    model.backward_traced(vec![(trace, weight)], &mut |gradients| {
        for (sum, slot) in recomputed.iter_mut().zip(model.params.iter()) {
            if let Some(gradient) = slot.leaf().grad(gradients) {
                *sum = Some(sum.take().map_or(gradient.clone(), |sum| sum + gradient));
            }
        }
    });
    let mut checked = 0;
    for (slot, recomputed) in model.params.iter().zip(recomputed) {
        let (plain, recomputed) = (slot.leaf().grad(&plain).expect("gradient"), recomputed.expect("gradient"));
        let name = format!("grad.{}", slot.name);
        if golden.contains(&name) {
            assert_close(&golden, &name, plain.clone(), GRADIENT);
            checked += 1;
        }
        let (plain, recomputed) = (to_floats(plain), to_floats(recomputed));
        // up to the order in which the contributions of text and image are added
        assert!(relative_error(&plain, &recomputed) <= allowed(SUMS), "{name} differs when activations are computed again");
    }
    assert_eq!(checked, 6);
}

#[test]
fn every_weight_has_an_original_name() {
    let model = load("i2v-tiny");
    let names: std::collections::BTreeSet<_> = model.params.iter().map(|slot| original_name(&slot.name).expect("a name")).collect();
    assert_eq!(names.len(), model.params.len());
    for name in
        ["img_emb.proj.0.weight", "img_emb.proj.3.bias", "blocks.1.cross_attn.k_img.weight", "blocks.0.cross_attn.norm_k_img.weight"]
    {
        assert!(names.contains(name), "{name}");
    }
    assert_eq!(model.config.num_parameters(), model.params.num_elements());
    let layers: Vec<(String, usize, usize)> =
        model.linears.iter().map(|site| (site.name.clone(), site.in_features, site.out_features)).collect();
    assert_eq!(model.config.linear_layers(), layers);
}

#[test]
fn half_an_image_branch_is_refused() {
    let dir = tempfile::tempdir().expect("folder");
    let config = std::fs::read_to_string(golden_dir().join("i2v-tiny/config.json")).expect("config");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    for (key, value, message) in [
        ("image_dim", serde_json::json!(null), "`added_kv_proj_dim` is `32`, but `image_dim` is absent"),
        ("added_kv_proj_dim", serde_json::json!(16), "`added_kv_proj_dim` is `Some(16)` for heads x head_dim = 32"),
        ("image_dim", serde_json::json!(0), "`image_dim` is 0"),
        ("pos_embed_seq_len", serde_json::json!(514), "`pos_embed_seq_len` is `514`"),
    ] {
        let mut config = config.clone();
        config[key] = value;
        let path = dir.path().join("config.json");
        std::fs::write(&path, config.to_string()).expect("write");
        let error = TransformerConfig::load(&path).expect_err(key).to_string();
        assert!(error.contains(message) && error.contains("hint: "), "{error}");
    }
}
