//! Clips are decoded only as far as their rewards look, and no reward can tell.

use burn::tensor::{Device, Tensor, TensorData};
use grpo::{Key, Purpose};
use std::path::Path;
use train::iteration::iteration;
use train::plan::{Machine, ModelSizes, Plan, TextLength};
use train::scoring::{Asked, score};
use train::settings::Settings;
use train::trainer::Trainer;
use video::Frames;

/// Rewards by their TOML, on clips of 17 frames (5 latent ones) of the embedded model.
fn settings(rewards: &[&str]) -> Settings {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes");
    let overrides = [
        format!("model.path={:?}", model.display().to_string()),
        format!("reward=[{}]", rewards.join(", ")),
        "sampling.num_frames=17".into(),
        "sampling.fps=16".into(),
        "sampling.height=32".into(),
        "sampling.width=32".into(),
        "sampling.num_inference_steps=2".into(),
        "method.stochastic={ type = \"random\", count = 1, pool = 1 }".into(),
        "rollout.prompts_per_iteration=1".into(),
        "rollout.group_size=2".into(),
        "eval.num_prompts=1".into(),
        "eval.samples_per_prompt=1".into(),
    ];
    Settings::load(None, &overrides).unwrap_or_else(|error| panic!("{error}"))
}

fn latents(trainer: &Trainer, clips: usize) -> Tensor<5> {
    let [c, f, h, w] = trainer.latent_shape();
    let values = Key { seed: 1, iteration: 0, prompt: 0, rollout: 0, purpose: Purpose::Data }.normals(clips * c * f * h * w);
    Tensor::from_data(TensorData::new(values, [clips, c, f, h, w]), &Device::flex())
}

fn values(trainer: &Trainer, clips: &[Frames]) -> Vec<f64> {
    let asked = vec![Asked { prompt: "a red circle", metadata: None, fps: trainer.settings.sampling.fps }; clips.len()];
    score(&trainer.reward, &asked, clips).into_iter().map(|score| score.expect("scored").value).collect()
}

/// Frames above 256 pixels are decoded in tiles where the recipe asks for it, and nearly the same.
#[test]
fn large_frames_are_decoded_in_tiles_on_request() {
    let decoded = |tiling: &str| {
        let mut settings = settings(&[FIRST]);
        (settings.sampling.height, settings.sampling.width, settings.sampling.num_frames) = (288, 288, 5);
        settings.sampling.vae_tiling = tiling == "tiles";
        let trainer = Trainer::new(settings, &Device::flex()).expect("trainer");
        trainer.decode(latents(&trainer, 1)).expect("decoded").remove(0)
    };
    let (whole, tiles) = (decoded("whole"), decoded("tiles"));
    assert_eq!((whole.height(), whole.width(), whole.num_frames()), (tiles.height(), tiles.width(), tiles.num_frames()));
    let differences: Vec<f32> = whole.data().iter().zip(tiles.data()).map(|(a, b)| (a - b).abs()).collect();
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    assert!(mean > 0.0 && mean < 0.05, "{mean}");
}

const FIRST: &str = "{ type = \"brightness\", frames = \"first\" }";
const EVERY: &str = "{ type = \"contrast\", frames = { every = 10 }, aggregate = \"last\" }";
const COUNT: &str = "{ type = \"brightness\", frames = { count = 1 } }";
const CLIP: &str = "{ type = \"dynamic-degree\" }";

/// Frames that are decoded, and that they and the values are those of the whole clip, bit for bit.
#[test]
fn rewards_are_those_of_whole_clips() {
    for (rewards, frames) in [
        (&[FIRST][..], 1),
        (&[EVERY], 13),
        (&[FIRST, EVERY], 13),
        (&[COUNT], 17),
        (&[FIRST, CLIP], 17),
        (&["{ type = \"brightness\", frames = { fps = 2.5 } }"], 17),
        (&["{ type = \"brightness\", frames = { fps = 1.5 } }"], 13),
        (&["{ type = \"shapes\" }"], 17),
    ] {
        let trainer = Trainer::new(settings(rewards), &Device::flex()).expect("trainer");
        let latents = latents(&trainer, 2);
        let (whole, part) = (trainer.decode(latents.clone()).expect("decoded"), trainer.decode_for_reward(latents).expect("decoded"));
        for (whole, part) in whole.iter().zip(&part) {
            assert_eq!((whole.num_frames(), part.num_frames()), (17, frames), "{rewards:?}");
            assert!(part.data() == &whole.data()[..part.data().len()], "{rewards:?}");
        }
        if !rewards[0].contains("shapes") {
            assert_eq!(values(&trainer, &whole), values(&trainer, &part), "{rewards:?}");
        }
    }
}

/// Training sees the same rewards as an evaluation of the same clips would, and a plan counts what is decoded.
#[test]
fn an_iteration_and_its_plan_decode_what_is_needed() {
    let mut trainer = Trainer::new(settings(&[FIRST]), &Device::flex()).expect("trainer");
    let metrics = iteration(&mut trainer, 0, &mut |_| {}).expect("iteration");
    assert!(metrics.reward_mean > 0.0 && metrics.reward_std > 0.0);
    let decode = |rewards: &[&str]| {
        let settings = settings(rewards);
        let sizes = ModelSizes::of(&settings).expect("sizes");
        Plan::new(&settings, &sizes, TextLength::of(&settings), Machine::default()).expect("plan").flops
    };
    let (first, all) = (decode(&[FIRST]), decode(&[CLIP]));
    assert!(first.decode_phase < 0.15 * all.decode_phase, "{} and {}", first.decode_phase, all.decode_phase);
    assert_eq!(first.decode, all.decode, "evaluations decode whole clips");
}
