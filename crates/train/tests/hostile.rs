//! Recipes, recordings and checkpoints with anything in them: an error with a hint, or it works; never a panic.
//!
//! `FLASH_GRPO_FUZZ_SECONDS=600 cargo test --release -p train --test hostile` spends that long on each parser.

use burn::tensor::{DType, Device};
use grpo::random::{Key, Purpose, index_below};
use rand_chacha::ChaCha8Rng;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use train::checkpoint::Checkpoint;
use train::iteration::iteration;
use train::policy::Policy;
use train::recording::Recording;
use train::settings::{DEFAULT_RECIPE, Settings, read_prompt_file};
use train::trainer::Trainer;
use wan::transformer::WanTransformer;

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

/// Calls `work` `count` times, or for as long as the environment says.
fn repeatedly(count: usize, mut work: impl FnMut(&mut Random)) {
    let seconds = std::env::var("FLASH_GRPO_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    let (end, mut random) = (Instant::now() + Duration::from_secs(seconds.unwrap_or(0)), Random::new(1));
    let mut done = 0;
    while done < count || Instant::now() < end {
        work(&mut random);
        done += 1;
    }
}

/// Calls `open` and wants no panic, and a hint with every error; returns what came out.
#[track_caller]
fn survives<T, E: Display>(what: &str, open: impl FnOnce() -> Result<T, E>) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            assert!(error.to_string().contains("hint: "), "no hint in `{error}`");
            None
        }
        Err(_) => panic!("this made it panic:\n{what}"),
    }
}

/// Values that a recipe may be given by mistake or by malice.
const VALUES: [&str; 22] = [
    "0",
    "-1",
    "1",
    "3",
    "1e308",
    "-0.0",
    "nan",
    "inf",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "\"\"",
    "\"x\"",
    "\"../..\"",
    "true",
    "[]",
    "[0]",
    "{}",
    "{ type = \"all\" }",
    "{ type = \"random\", count = 9223372036854775807, pool = 9223372036854775807 }",
    "[[[[[[[[[[[[[[]]]]]]]]]]]]]]",
    "1979-05-27",
];

#[test]
fn spoiled_recipes_are_errors() {
    let mut refused = 0;
    repeatedly(600, |random| {
        let mut lines: Vec<String> = DEFAULT_RECIPE.lines().map(str::to_owned).collect();
        for _ in 0..=random.below(2) {
            let at = random.below(lines.len());
            match (random.below(6), lines[at].split_once('=')) {
                (0, _) => drop(lines.remove(at)),
                (1, _) => lines.insert(at, lines[random.below(lines.len())].clone()),
                (2, _) => {
                    let mut bytes = lines[at].clone().into_bytes();
                    if !bytes.is_empty() {
                        let place = random.below(bytes.len());
                        bytes[place] = random.below(128) as u8;
                    }
                    lines[at] = String::from_utf8_lossy(&bytes).into_owned();
                }
                (_, Some((key, _))) => lines[at] = format!("{key}= {}", VALUES[random.below(VALUES.len())]),
                _ => {}
            }
        }
        let text = lines.join("\n");
        let parsed = survives(&text, || {
            let settings = Settings::parse("recipe.toml", &text, &[])?;
            let _ = settings.step_table();
            Ok::<_, train::settings::SettingsError>(settings)
        });
        refused += usize::from(parsed.is_none());
    });
    assert!(refused > 200, "{refused}");
}

#[test]
fn spoiled_prompt_files_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    repeatedly(200, |random| {
        let path = folder.path().join(["prompts.txt", "prompts.jsonl"][random.below(2)]);
        let bytes: Vec<u8> =
            (0..random.below(200)).map(|_| [b'a', b' ', b'\n', b'#', 0xc3, 0xa9, 0xff, 7, 0, b'\r'][random.below(10)]).collect();
        std::fs::write(&path, &bytes).expect("write");
        survives(&format!("{bytes:?}"), || read_prompt_file(&path, "prompts.train"));
    });
}

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes")
}

/// A run folder with one iteration's recording and a checkpoint.
fn recorded(folder: &Path) -> Trainer {
    let overrides = [
        format!("model.path={:?}", model().display().to_string()),
        format!("output_dir={:?}", folder.display().to_string()),
        "rollout.prompts_per_iteration=2".into(),
        "rollout.group_size=2".into(),
        "sampling.num_inference_steps=3".into(),
        "method.stochastic={ type = \"random\", count = 1, pool = 2 }".into(),
        "debug.save_rollouts=true".into(),
    ];
    let settings = Settings::load(None, &overrides).expect("settings");
    let mut trainer = Trainer::new(settings, &Device::flex()).expect("trainer");
    iteration(&mut trainer, 0, &mut |_| {}).expect("iteration");
    trainer
}

/// Changes the header: bytes of it, or one of its values.
fn spoil_header(file: &[u8], random: &mut Random) -> Vec<u8> {
    let length = u64::from_le_bytes(std::array::from_fn(|i| file[i])) as usize;
    let mut bytes = file.to_vec();
    match random.below(3) {
        0 => bytes[8 + random.below(length)] = random.below(128) as u8,
        1 => bytes.truncate(random.below(file.len())),
        _ => {
            let header = String::from_utf8_lossy(&file[8..8 + length]).into_owned();
            let numbers: Vec<(usize, char)> = header.char_indices().filter(|(_, c)| c.is_ascii_digit()).collect();
            let (at, _) = numbers[random.below(numbers.len())];
            let new = ["0", "9", "-1", "7777777", "1e300", "null"][random.below(6)];
            let header = format!("{}{new}{}", &header[..at], &header[at + 1..]);
            bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &file[8 + length..]].concat();
        }
    }
    bytes
}

#[test]
fn spoiled_recordings_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    recorded(folder.path());
    let good = std::fs::read(folder.path().join("rollouts-000000.safetensors")).expect("recording");
    let transformer = WanTransformer::load(&model().join("transformer"), &Device::flex(), DType::F32).expect("transformer");
    let policy = Policy::from_parts(transformer, None);
    let path = folder.path().join("spoiled.safetensors");
    let mut loaded = 0;
    repeatedly(200, |random| {
        let spoiled = spoil_header(&good, random);
        std::fs::write(&path, &spoiled).expect("write");
        let header = String::from_utf8_lossy(&spoiled[..spoiled.len().min(3000)]).into_owned();
        let recording = survives(&header, || {
            let recording = Recording::load(&path, 4, &Device::flex())?;
            recording.check_fits(&policy.transformer.config)?;
            Ok::<_, train::Error>(recording)
        });
        if let Some(recording) = recording {
            loaded += 1;
            if loaded < 8 {
                survives(&header, || Ok::<_, train::Error>(recording.evaluate(&policy)));
            }
        }
    });
    assert!(loaded > 0, "none was left whole enough to load");
}

#[test]
fn spoiled_manifests_are_errors() {
    let folder = tempfile::tempdir().expect("folder");
    let trainer = recorded(folder.path());
    let checks = train::checks::self_check(&trainer, &mut |_| {}).expect("checks");
    let position = train::checkpoint::Position { iterations: 1, eval_reward: Some(0.5), logs: Default::default(), checks };
    train::checkpoint::save(&trainer, &position, folder.path()).expect("checkpoint");
    let checkpoint = folder.path().join("iteration-000001");
    let manifest = checkpoint.join("manifest.json");
    let good = std::fs::read(&manifest).expect("manifest");
    assert!(survives("whole", || Checkpoint::open(&checkpoint)).is_some());
    repeatedly(200, |random| {
        let mut bytes = good.clone();
        match random.below(3) {
            0 => bytes.truncate(random.below(good.len())),
            _ => (0..=random.below(3)).for_each(|_| bytes[random.below(good.len())] = random.below(128) as u8),
        }
        std::fs::write(&manifest, &bytes).expect("write");
        survives(&String::from_utf8_lossy(&bytes), || Checkpoint::open(&checkpoint));
    });
}
