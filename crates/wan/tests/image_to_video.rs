//! The transformers of image-to-video against the public Python implementation (golden/README.md).

mod common;
#[path = "common/experts.rs"]
mod experts;

use burn::tensor::{DType, Tensor};
use common::device::{allowed, device};
use common::{Golden, assert_close, golden_dir, relative_error};
use wan::clip::{ClipVision, ClipVisionConfig};
use wan::image::{ImageCondition, ImageInput, Known, StartImage};
use wan::original::original_name;
use wan::pipeline::{SampleRequest, WanPipeline};
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

/// max|a-b| / max|ref| of latents after up to 8 steps.
const LATENTS: f64 = 5e-5;
/// Of what the autoencoder makes of the image.
const CONDITION: f64 = 1e-4;

fn pipeline() -> WanPipeline {
    let one = experts::image_to_video(&golden_dir().join("wan-tiny"));
    let dir = experts::two_experts(one.path(), 0.9);
    WanPipeline::load(dir.path(), &device(), DType::F32).unwrap_or_else(|e| panic!("{e}"))
}

/// The request of golden/pipeline.json, with an image.
fn request(golden: &Golden) -> SampleRequest {
    SampleRequest {
        prompt: "A red fox runs across a snowy field at sunrise.".into(),
        negative_prompt: "low quality, blurred details, static".into(),
        image: Some(StartImage { frame: golden.tensor("image"), square: None }),
        height: 32,
        width: 48,
        num_frames: 9,
        num_inference_steps: 8,
        guidance_scale: 4.5,
        guidance_scale_2: Some(3.0),
        initial_latents: Some(Golden::open("pipeline").tensor("latents_initial")),
        ..SampleRequest::default()
    }
}

/// Two networks, 8 steps, from an image.
#[test]
fn matches_reference_image_to_video_pipeline() {
    let (golden, pipeline) = (Golden::open("i2v_pipeline"), pipeline());
    let Known::Channels(channels) = condition(&golden, &pipeline) else { panic!("channels") };
    assert_close(&golden, "condition", channels, CONDITION);
    let made = pipeline.sample(&request(&golden), &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let error = relative_error(&to_floats(made.latents.clone()), &to_floats(last_latents(&golden, "latents_after_step")));
    assert!(error <= allowed(LATENTS), "{error:e}");
    assert_frames(&golden, "frames", made.frames);
}

/// Wan2.2 TI2V-5B: the image is the first latent frame, whose tokens have timestep 0; without an image it makes videos of text.
#[test]
fn matches_reference_image_to_video_pipeline_with_expanded_timesteps() {
    let dir = experts::expanded(&golden_dir().join("wan-tiny"));
    let pipeline = WanPipeline::load(dir.path(), &device(), DType::F32).unwrap_or_else(|e| panic!("{e}"));
    let golden = Golden::open("i2v_pipeline");
    let Known::FirstFrame(first) = condition(&golden, &pipeline) else { panic!("a first frame") };
    assert_close(&golden, "expanded.condition", first.clone(), CONDITION);
    let request = SampleRequest { guidance_scale_2: None, ..request(&golden) };
    let made = pipeline.sample(&request, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(to_floats(made.latents.clone().narrow(2, 0, 1)), to_floats(first));
    // the reference goes on denoising the first latent frame, which nobody sees, and puts the image there at the end
    let rest = |latents: Tensor<5>| to_floats(latents.narrow(2, 1, 2));
    let error = relative_error(&rest(made.latents), &rest(last_latents(&golden, "expanded.latents_after_step")));
    assert!(error <= allowed(LATENTS), "{error:e}");
    assert_frames(&golden, "expanded.frames", made.frames);
    let text = pipeline.sample(&SampleRequest { image: None, ..request.clone() }, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let golden = Golden::open("pipeline");
    let worst = relative_error(&to_floats(text.latents), &to_floats(last_latents(&golden, "latents_after_step")));
    assert!(worst <= allowed(LATENTS), "{worst:e}");
    let error = pipeline.sample(&SampleRequest { num_frames: 1, ..request }, &mut |_, _| {}).expect_err("refused").to_string();
    assert!(error.contains("num_frames") && error.contains("hint: "), "{error}");
}

fn condition(golden: &Golden, pipeline: &WanPipeline) -> Known {
    let image = StartImage { frame: golden.tensor("image"), square: None };
    ImageCondition::new(pipeline.image_input, &pipeline.vae, None, image, 9).known
}

fn last_latents(golden: &Golden, name: &str) -> Tensor<5> {
    let after: Tensor<6> = golden.tensor(name);
    after.narrow(0, 7, 1).squeeze_dim(0)
}

/// The reference has the frames before the channels.
fn assert_frames(golden: &Golden, name: &str, frames: Tensor<5>) {
    let reference: Tensor<5> = golden.tensor(name);
    let worst = to_floats((frames - reference.permute([0, 2, 1, 3, 4])).abs().max())[0];
    assert!(f64::from(worst) <= allowed(LATENTS), "{worst:e}");
}

/// Which models read pictures, and how.
#[test]
fn released_models_read_images_as_their_configs_say() {
    let input = |config: TransformerConfig, expand_timesteps| ImageInput::new(&config, expand_timesteps);
    assert_eq!(input(TransformerConfig::wan21_1_3b(), false), ImageInput::None);
    assert_eq!(input(TransformerConfig::wan21_i2v_14b(), false), ImageInput::Channels);
    assert_eq!(input(TransformerConfig::wan22_i2v_14b(), false), ImageInput::Channels);
    assert_eq!(input(TransformerConfig::wan22_ti2v_5b(), true), ImageInput::FirstFrame);
}

/// An image for a model that starts with one, of the video's size; and none for others.
#[test]
fn images_that_do_not_fit_are_refused() {
    let (golden, pipeline) = (Golden::open("i2v_pipeline"), pipeline());
    let refused = |pipeline: &WanPipeline, request: SampleRequest| match pipeline.sample(&request, &mut |_, _| {}) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("sampled"),
    };
    assert!(refused(&pipeline, SampleRequest { image: None, ..request(&golden) }).contains("first frame"));
    let small = Some(StartImage { frame: Tensor::zeros([1, 3, 16, 48], &device()), square: None });
    assert!(refused(&pipeline, SampleRequest { image: small, ..request(&golden) }).contains("[1, 3, 32, 48]"));
    let text = WanPipeline::load(&golden_dir().join("wan-tiny"), &device(), DType::F32).unwrap_or_else(|e| panic!("{e}"));
    assert!(refused(&text, SampleRequest { guidance_scale_2: None, ..request(&golden) }).contains("of text alone"));
}

/// What the golden files have as normalised pixels, as images in [0, 1].
fn images(golden: &Golden, name: &str) -> Tensor<4> {
    let channel = |values: [f32; 3]| Tensor::<1>::from_floats(values, &device()).reshape([1, 3, 1, 1]);
    let pixels: Tensor<4> = golden.tensor(name);
    pixels * channel([0.268_629_5, 0.261_302_6, 0.275_777_1]) + channel([0.481_454_66, 0.457_827_5, 0.408_210_73])
}

#[test]
fn matches_reference_image_encoder() {
    let golden = Golden::open("clip");
    let encoder = ClipVision::load(&golden_dir().join("clip-tiny"), &device()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(encoder.config.num_tokens(), 17);
    for case in ["random", "picture"] {
        assert_close(&golden, &format!("{case}_features"), encoder.forward(images(&golden, case)), FORWARD);
    }
    // the released one has 632 million parameters
    assert_eq!(ClipVisionConfig::vit_h().num_parameters() / 1_000_000, 630);
    assert_eq!(ClipVisionConfig::vit_h().num_tokens(), 257);
}

/// Wan2.1: an image encoder, to which both branches attend.
#[test]
fn matches_reference_image_to_video_pipeline_with_encoder() {
    let dir = experts::image_to_video_with_encoder(&golden_dir());
    let pipeline = WanPipeline::load(dir.path(), &device(), DType::F32).unwrap_or_else(|e| panic!("{e}"));
    let (golden, picture) = (Golden::open("i2v21_pipeline"), Golden::open("clip"));
    let image = StartImage { frame: golden.tensor("frame"), square: Some(images(&picture, "picture")) };
    let request = SampleRequest { image: Some(image), guidance_scale_2: None, ..request(&Golden::open("i2v_pipeline")) };
    let made = pipeline.sample(&request, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let error = relative_error(&to_floats(made.latents), &to_floats(last_latents(&golden, "latents_after_step")));
    assert!(error <= allowed(LATENTS), "{error:e}");
    // the encoder's image counts, and has to be there
    let other = StartImage { square: Some(images(&picture, "picture").flip([3])), ..request.image.clone().expect("an image") };
    let other = pipeline.sample(&SampleRequest { image: Some(other), ..request.clone() }, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let difference = relative_error(&to_floats(other.latents), &to_floats(last_latents(&golden, "latents_after_step")));
    assert!(difference > 1e-3, "{difference:e}");
    let none = StartImage { square: None, ..request.image.clone().expect("an image") };
    let error = pipeline.sample(&SampleRequest { image: Some(none), ..request }, &mut |_, _| {}).expect_err("refused").to_string();
    assert!(error.contains("image encoder"), "{error}");
}

#[test]
fn a_folder_without_its_image_encoder_is_refused() {
    let dir = experts::image_to_video_with_encoder(&golden_dir());
    std::fs::remove_file(dir.path().join("image_encoder/model.safetensors")).expect("removed");
    std::fs::remove_dir_all(dir.path().join("image_processor")).expect("removed");
    let error = WanPipeline::load(dir.path(), &device(), DType::F32).expect_err("refused").to_string();
    assert!(error.contains("image_encoder/model.safetensors") && error.contains("image_processor/preprocessor_config.json"), "{error}");
}
