//! Training a model of image-to-video: two small networks that read the start of a video beside the latents.

#[path = "../../wan/tests/common/experts.rs"]
mod experts;

use burn::tensor::Device;
use std::path::{Path, PathBuf};
use train::batch::Batch;
use train::evaluate::evaluate;
use train::first_frames::start;
use train::inputs;
use train::iteration::{Clock, IterationMetrics, iteration};
use train::recording::{self, Recording};
use train::replay::TransitionBatch;
use train::settings::Settings;
use train::trainer::Trainer;
use video::Picture;
use wan::weights::{WeightFiles, to_floats};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/wan-tiny")
}

/// A model folder, and prompts with pictures.
struct World {
    model: tempfile::TempDir,
    prompts: tempfile::TempDir,
}

impl World {
    /// As Wan2.2: two networks that read the picture beside the latents.
    fn new() -> Self {
        let one = experts::image_to_video(&golden());
        Self::of(experts::two_experts(one.path(), 0.9))
    }

    /// As Wan2.1: one network, which attends to what an image encoder says, too.
    fn with_encoder() -> Self {
        Self::of(experts::image_to_video_with_encoder(golden().parent().expect("folder")))
    }

    /// As Wan2.2 TI2V-5B: the picture is the first latent frame.
    fn expanded() -> Self {
        Self::of(experts::expanded(&golden()))
    }

    fn of(model: tempfile::TempDir) -> Self {
        let world = Self { model, prompts: tempfile::tempdir().expect("folder") };
        world.write(
            "prompts.jsonl",
            "{\"prompt\": \"a red fox\", \"image\": \"picture.png\"}\n{\"prompt\": \"snow\", \"image\": \"picture.jpg\"}\n",
        );
        for name in ["picture.png", "picture.jpg"] {
            world.copy(name, name);
        }
        world
    }

    /// One of the pictures of the tests, under a name that the prompts use.
    fn copy(&self, picture: &str, name: &str) {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../video/tests/fixtures");
        std::fs::copy(fixtures.join(picture), self.prompts.path().join(name)).expect("copied");
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.prompts.path().join(name), text).expect("written");
    }

    fn settings(&self, more: &[&str]) -> Settings {
        let prompts = self.prompts.path().join("prompts.jsonl");
        let mut overrides: Vec<String> = [
            format!("model.path={:?}", self.model.path()),
            format!("prompts.train={:?}", prompts),
            format!("prompts.eval={:?}", prompts),
            "reward=[{ type = \"brightness\" }]".into(),
            "sampling.num_frames=5".into(),
            "sampling.height=32".into(),
            "sampling.width=48".into(),
            "sampling.num_inference_steps=4".into(),
            "sampling.guidance_scale=3.0".into(),
            "method.stochastic={ type = \"random\", count = 1, pool = 3 }".into(),
            "rollout.prompts_per_iteration=2".into(),
            "rollout.group_size=2".into(),
            "rollout.micro_batch=2".into(),
            "eval.num_prompts=2".into(),
            "eval.samples_per_prompt=1".into(),
            "eval.num_inference_steps=3".into(),
        ]
        .into();
        overrides.extend(more.iter().map(|text| (*text).to_owned()));
        Settings::load(None, &overrides).unwrap_or_else(|error| panic!("{error}"))
    }

    fn trainer(&self, more: &[&str]) -> Result<Trainer, String> {
        Trainer::new(self.settings(more), &Device::flex()).map_err(|error| error.to_string())
    }
}

/// Metrics of an iteration, the reward of an evaluation after it, and the adapters.
fn run(trainer: &mut Trainer) -> (IterationMetrics, f64, Vec<f32>) {
    let metrics = iteration(trainer, 0, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let evaluation = evaluate(trainer, "evaluation", &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let weights = trainer.policy.params().snapshot().into_iter().flat_map(to_floats).collect();
    (metrics, evaluation.reward(), weights)
}

/// Replay sees what the rollout saw; an update moves the adapters, and is the same again to the last bit, whatever is kept or shared.
fn learns_from_pictures(world: &World) {
    let (metrics, reward, weights) = run(&mut world.trainer(&[]).expect("trainer"));
    assert_eq!(metrics.ratio_deviation, 0.0);
    assert!(metrics.grad_norm > 0.0 && metrics.grad_norm.is_finite() && reward.is_finite());
    for more in [&[][..], &["train.activation_checkpointing=true"], &["rollout.micro_batch=1"]] {
        let (_, again, same) = run(&mut world.trainer(more).expect("trainer"));
        assert!((again - reward).abs() < 1e-6 * reward && same.len() == weights.len(), "{more:?}");
        if more.is_empty() {
            assert!(again.to_bits() == reward.to_bits() && same == weights);
        }
    }
    // another picture, another video
    world.copy("grey.png", "picture.png");
    let (_, other, _) = run(&mut world.trainer(&[]).expect("trainer"));
    assert!((other - reward).abs() > 1e-5, "{other} and {reward}");
}

#[test]
fn a_run_learns_from_pictures() {
    learns_from_pictures(&World::new());
}

#[test]
fn a_run_learns_from_pictures_and_what_an_encoder_says_of_them() {
    learns_from_pictures(&World::with_encoder());
}

#[test]
fn a_run_learns_from_pictures_that_are_the_first_latent_frame() {
    let world = World::expanded();
    learns_from_pictures(&world);
    // noise, steps and probabilities are of the two other latent frames
    let trainer = world.trainer(&["sampling.num_frames=9"]).expect("trainer");
    let batch = Batch::plan(&trainer.settings, 2, 0).expect("planned");
    for chunk in batch.updates.iter().flatten() {
        let rollouts = batch.roll_out(&trainer, chunk, false).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(rollouts.latents.dims()[2], 3);
        assert!(rollouts.transitions.iter().all(|batch| batch.latents.dims()[2] == 2));
        assert!((rollouts.noise_power - 1.0).abs() < 0.1, "{}", rollouts.noise_power);
        // rollouts of a prompt start with the same picture, and go on differently
        let [first, rest] = [(0, 1), (1, 2)].map(|(from, count)| to_floats(rollouts.latents.clone().narrow(2, from, count)));
        let halves = |values: &[f32]| values[..values.len() / 2] == values[values.len() / 2..];
        assert!(halves(&first) && !halves(&rest));
    }
}

/// Pictures and weights are part of what a run is resumed with.
#[test]
fn another_picture_is_another_input() {
    let world = World::new();
    let before = world.trainer(&[]).expect("trainer").inputs;
    assert_eq!(world.trainer(&[]).expect("trainer").inputs, before);
    world.copy("grey.png", "picture.png");
    let now = world.trainer(&[]).expect("trainer").inputs;
    assert_eq!(inputs::changed(&before, &now), ["prompts.eval", "prompts.train"]);
    let other = World::expanded().trainer(&[]).expect("trainer").inputs;
    assert_eq!(inputs::changed(&now, &other), ["model.path", "prompts.eval", "prompts.train"]);
}

/// Recorded rollouts of every kind of model are replayed as they were made; a model of another kind refuses them.
#[test]
fn recorded_rollouts_start_with_their_pictures() {
    let worlds = [World::new(), World::with_encoder(), World::expanded()];
    let recordings: Vec<(Trainer, Recording)> = worlds.iter().map(recorded).collect();
    for (of, (trainer, _)) in recordings.iter().enumerate() {
        let config = &trainer.policy.transformer.config;
        for (from, (_, recording)) in recordings.iter().enumerate() {
            let refused = recording.check_fits(config).err().map(|error| error.to_string());
            assert_eq!(refused.is_none(), of == from, "{of} and {from}: {refused:?}");
            assert!(refused.is_none_or(|error| error.contains("image_") && error.contains("hint: ")));
        }
        // log-probabilities are recorded in f32
        let deviation = recordings[of].1.evaluate(&trainer.policy).ratio_deviation();
        assert!(deviation < 1e-6, "{deviation:e}");
    }
}

/// An iteration's transitions, written and read again.
fn recorded(world: &World) -> (Trainer, Recording) {
    let trainer = world.trainer(&[]).expect("trainer");
    let batch = Batch::plan(&trainer.settings, 2, 0).expect("planned");
    let sampled = batch.sample(&trainer, false, &mut |_| {}, &mut Clock::start()).unwrap_or_else(|error| panic!("{error}"));
    let transitions: Vec<TransitionBatch> =
        batch.transitions(&sampled.transitions, &[1.0, -1.0, 0.5, -0.5]).into_iter().flatten().collect();
    let path = world.prompts.path().join("rollouts.safetensors");
    recording::save(&trainer, &transitions, &path).unwrap_or_else(|error| panic!("{error}"));
    let recording = Recording::load(&path, 2, &Device::flex()).unwrap_or_else(|error| panic!("{error}"));
    (trainer, recording)
}

/// The same model makes videos of text where no prompt has a picture; some pictures are a mistake.
#[test]
fn pictures_are_for_all_prompts_or_for_none() {
    let world = World::expanded();
    let refused = |more: &[&str]| world.trainer(more).err().expect("refused");
    let texts = world.prompts.path().join("texts.txt");
    world.write("texts.txt", "a red fox\nsnow\n");
    let [train, eval] = ["train", "eval"].map(|list| format!("prompts.{list}={texts:?}"));
    let (metrics, ..) = run(&mut world.trainer(&[&train, &eval]).expect("trainer"));
    assert_eq!(metrics.ratio_deviation, 0.0);
    let error = refused(&[&eval]);
    assert!(error.contains("those of `prompts.eval` have none") && error.contains("hint:"), "{error}");
    let error = refused(&["sampling.num_frames=1"]);
    assert!(error.contains("sampling.num_frames"), "{error}");
    world.write("prompts.jsonl", "{\"prompt\": \"a red fox\", \"image\": \"picture.png\"}\n{\"prompt\": \"snow\"}\n");
    let error = refused(&[]);
    assert!(error.contains("prompt 2, `snow`, has no image, but others have one"), "{error}");
}

/// The square that the encoder sees is that of the Python library, which rounds to bytes elsewhere.
#[test]
fn squares_are_prepared_as_the_reference_does() {
    let golden = WeightFiles::open_file(&golden().join("../clip.safetensors")).expect("golden file");
    let picture = Picture::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../video/tests/fixtures/picture.png")).expect("a picture");
    let square = start(&picture, 32, 48, Some(16), &Device::flex()).square.expect("a square");
    let (mean, std) = ([0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_5_f32, 0.261_302_6, 0.275_777_1]);
    let pixels = golden.floats("picture").expect("values");
    let expected = pixels.iter().enumerate().map(|(i, value)| value * std[i / 256] + mean[i / 256]);
    let worst = to_floats(square).into_iter().zip(expected).map(|(a, b): (f32, f32)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1.5 / 255.0, "{worst}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_sampled() {
    let world = World::new();
    let refused = |more: &[&str]| world.trainer(more).err().expect("refused");
    let text = format!("model.path={:?}", golden());
    let error = refused(&[&text]);
    assert!(error.contains("`prompts.train`") || error.contains("prompt 1"), "{error}");
    assert!(error.contains("text alone"), "{error}");
    world.write("prompts.jsonl", "{\"prompt\": \"a red fox\", \"image\": \"picture.png\"}\n{\"prompt\": \"snow\"}\n");
    let error = refused(&[]);
    assert!(error.contains("prompt 2, `snow`, has no image") && error.contains("hint:"), "{error}");
    world.write("prompts.jsonl", "{\"prompt\": \"a red fox\", \"image\": \"absent.png\"}\n");
    let error = refused(&[]);
    assert!(error.contains("absent.png") && error.contains("hint:"), "{error}");
}
