//! Prompts are encoded once: the second run that needs them never touches the text encoder.

use burn::tensor::Device;
use std::path::{Path, PathBuf};
use train::embedding_cache::EmbeddingCache;
use train::prompts::PromptSet;
use train::settings::Settings;
use train::trainer::Trainer;
use wan::text::StagedTextEncoder;
use wan::weights::to_floats;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/moving-shapes")
}

fn encoder(model: &Path) -> StagedTextEncoder {
    StagedTextEncoder::open(model, &Device::flex()).expect("text encoder")
}

fn texts() -> Vec<String> {
    ["a red ball moves left", "a blue square", "", "a red ball moves left"].map(str::to_owned).to_vec()
}

#[test]
fn the_encoder_is_asked_once() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let encoder = encoder(&model());
    let cache = EmbeddingCache::open(&dir.path().join("new/cache"), &encoder).expect("cache");
    let made = PromptSet::encode_staged(vec![texts()], &encoder, Some(&cache), 32).expect("encoded");
    let ids: Vec<Vec<u32>> = texts().iter().map(|text| encoder.tokenizer.encode(text, 32).expect("tokens")).collect();
    let read = cache.get_or_encode(&ids, |_| panic!("everything is there")).expect("read");
    for (i, prompt) in read.into_iter().enumerate() {
        let [length, features] = prompt.dims();
        let own = made[0].embeds(&[i], &Device::flex());
        assert_eq!([1, length, features], own.embeds.dims(), "true length only");
        assert_eq!(to_floats(prompt), to_floats(own.embeds));
    }
    let files = std::fs::read_dir(dir.path().join("new/cache")).expect("folder").count();
    assert_eq!(files, 3, "equal prompts are one entry");
}

#[test]
fn what_is_missing_or_broken_is_encoded() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let encoder = encoder(&model());
    let cache = EmbeddingCache::open(dir.path(), &encoder).expect("cache");
    PromptSet::encode_staged(vec![texts()], &encoder, Some(&cache), 32).expect("encoded");
    let first = std::fs::read_dir(dir.path()).expect("folder").next().expect("an entry").expect("entry").path();
    std::fs::write(&first, b"broken").expect("writable");
    let ids: Vec<Vec<u32>> =
        ["a red ball moves left", "a blue square", ""].iter().map(|t| encoder.tokenizer.encode(t, 32).expect("tokens")).collect();
    let mut asked = 0;
    cache
        .get_or_encode(&ids, |missing| {
            asked = missing.len();
            Ok(encoder.encode(missing, &mut |_, _| {})?)
        })
        .expect("encoded");
    assert_eq!(asked, 1);
    assert!(std::fs::metadata(&first).expect("replaced").len() > 100);
}

/// Other weights are another encoder.
#[test]
fn another_encoder_has_other_entries() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let copy = dir.path().join("model");
    for part in ["tokenizer", "text_encoder"] {
        std::fs::create_dir_all(copy.join(part)).expect("folder");
        for entry in std::fs::read_dir(model().join(part)).expect("folder") {
            let entry = entry.expect("entry");
            std::fs::copy(entry.path(), copy.join(part).join(entry.file_name())).expect("copied");
        }
    }
    let ids = vec![vec![3, 4, 1]];
    let cache = |model: &Path| EmbeddingCache::open(&dir.path().join("cache"), &encoder(model)).expect("cache");
    let filled = |model: &Path| {
        let mut asked = false;
        cache(model)
            .get_or_encode(&ids, |ids| {
                asked = true;
                Ok(encoder(model).encode(ids, &mut |_, _| {})?)
            })
            .expect("encoded");
        asked
    };
    assert!(filled(&model()));
    assert!(!filled(&copy), "the same files elsewhere are the same encoder");
    let weights = copy.join("text_encoder/model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("readable");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&weights, bytes).expect("writable");
    assert!(filled(&copy));
}

/// A run with a cache gets the embeddings of a run without, up to rounding, and the same ones whenever it starts.
#[test]
fn a_run_starts_from_the_cache() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let trainer = |more: &[String]| {
        let mut overrides = vec![format!("model.path={:?}", model().display().to_string())];
        overrides.extend_from_slice(more);
        Trainer::new(Settings::load(None, &overrides).expect("settings"), &Device::flex()).expect("trainer")
    };
    let cached = [format!("model.embedding_cache={:?}", dir.path().display().to_string())];
    let values = |trainer: &Trainer| {
        let all = |set: &PromptSet| set.embeds(&(0..set.len()).collect::<Vec<_>>(), &Device::flex());
        let sets = [all(&trainer.train_prompts), all(&trainer.eval_prompts), trainer.negative.clone()];
        sets.map(|set| (set.lengths, to_floats(set.embeds)))
    };
    let (plain, first, second) = (values(&trainer(&[])), values(&trainer(&cached)), values(&trainer(&cached)));
    assert_eq!(first, second);
    for ((lengths, plain), (same, cached)) in plain.iter().zip(&first) {
        assert_eq!(lengths, same);
        let largest = plain.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        let worst = plain.iter().zip(cached).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 5e-6 * largest, "relative error {:e}", worst / largest);
    }
}
