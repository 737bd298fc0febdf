//! Networks in ONNX against what they must give, in the real ONNX Runtime, and text read by the real PP-OCR. `scripts/fetch_ocr.sh` fetches both;
//! without them these tests say that they were skipped.

#![allow(clippy::print_stdout, reason = "a test that is skipped says so")]

use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use reward::ocr::{OcrReward, OcrSettings};
use reward::onnx::{OnnxReward, OnnxSettings, Resampling, ResizeMode};
use reward::{Aggregation, FrameSelection, Reward, Sample, Scored};
use shapes::{RenderOptions, all_signs, held_out_signs, render_sign};
use video::Frames;

/// A file that was fetched.
fn fetched(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/ocr").join(name);
    if !path.is_file() {
        println!("skipped: run scripts/fetch_ocr.sh to have models/ocr/{name}");
        return None;
    }
    Some(path)
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn clips(count: usize, options: RenderOptions) -> Vec<(String, Frames)> {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    // a stride that mixes all letters at all places
    let signs = all_signs();
    let chosen = (0..count).map(|i| signs[i * 37 % signs.len()]);
    chosen.map(|sign| (sign.to_string(), render_sign(&sign, &mut rng, &options))).collect()
}

const SMALL: RenderOptions = RenderOptions { num_frames: 5, height: 32, width: 64 };

fn values(scored: &[Scored]) -> Vec<f64> {
    scored.iter().map(|scored| scored.as_ref().expect("scored").value).collect()
}

fn samples(clips: &[(String, Frames)]) -> Vec<Sample<'_>> {
    clips.iter().map(|(prompt, frames)| Sample::new(prompt, frames)).collect()
}

/// The network of the fixture gives mean and maximum of an image: the same numbers are computed here.
#[test]
fn a_scorer_gives_the_numbers_of_its_network() {
    let Some(library) = fetched("libonnxruntime.so") else { return };
    let clips = clips(7, SMALL);
    let mut settings = OnnxSettings::new(fixture("scorer.onnx"), [64, 32]);
    settings = OnnxSettings { library: Some(library), mean: [0.0; 3], std: [1.0; 3], batch_size: 3, ..settings };
    settings.frames = FrameSelection::Every(2);
    let of = |change: &dyn Fn(&mut OnnxSettings)| {
        let mut settings = settings.clone();
        change(&mut settings);
        let reward = OnnxReward::new(settings).expect("opens");
        values(&reward.score(&samples(&clips)))
    };
    let frames_of = |frames: &Frames| [0, 2, 4].map(|i| frames.frame(i).iter().map(|&v| f64::from(v)).collect::<Vec<_>>());
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let means: Vec<f64> = clips.iter().map(|(_, frames)| mean(&frames_of(frames).map(|frame| mean(&frame)))).collect();
    let maxima: Vec<f64> =
        clips.iter().map(|(_, frames)| frames_of(frames).concat().into_iter().fold(f64::NEG_INFINITY, f64::max)).collect();
    let close = |a: &[f64], b: &[f64], within: f64| a.iter().zip(b).all(|(a, b)| (a - b).abs() < within) && a.len() == b.len();
    assert!(close(&of(&|_| {}), &means, 1e-5));
    assert!(close(
        &of(&|s| {
            s.output = 1;
            s.aggregate = Aggregation::Max;
        }),
        &maxima,
        1e-6
    ));
    let normalised: Vec<f64> = means.iter().map(|m| (m - 0.5) / 0.25).collect();
    assert!(close(
        &of(&|s| {
            s.mean = [0.5; 3];
            s.std = [0.25; 3];
        }),
        &normalised,
        1e-4
    ));
    // The middle of a frame twice as wide as high, which is high enough already.
    let middle = |frame: &[f32]| frame.chunks_exact(64 * 3).flat_map(|row| row[16 * 3..48 * 3].to_vec()).map(f64::from).collect::<Vec<_>>();
    let middles: Vec<f64> = clips.iter().map(|(_, frames)| mean(&[0, 2, 4].map(|i| mean(&middle(frames.frame(i)))))).collect();
    assert!(close(
        &of(&|s| {
            s.size = [32, 32];
            s.resize_mode = ResizeMode::Shortest;
        }),
        &middles,
        1e-5
    ));
    // Shrinking averages: nothing is skipped, so the mean stays.
    assert!(close(
        &of(&|s| {
            s.size = [8, 4];
            s.resampling = Resampling::Bilinear;
        }),
        &means,
        0.02
    ));
}

/// The fixture, made to take exactly one image of any size: its first size is the number 1 in place of a name.
fn for_one_image(folder: &Path) -> PathBuf {
    let mut bytes = std::fs::read(fixture("scorer.onnx")).expect("the fixture");
    // dim_param "n", and dim_value 1 in as many bytes
    let (named, one) = (b"\x0a\x03\x12\x01n", b"\x0a\x03\x08\x81\x00");
    let places: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i..].starts_with(named)).collect();
    assert_eq!(places.len(), 2, "of input and output");
    places.into_iter().for_each(|place| bytes[place..place + one.len()].copy_from_slice(one));
    let path = folder.join("one.onnx");
    std::fs::write(&path, bytes).expect("write");
    path
}

#[test]
fn a_network_for_one_image_gets_one_image_at_a_time() {
    let Some(library) = fetched("libonnxruntime.so") else { return };
    let folder = tempfile::tempdir().expect("folder");
    let of = |model: PathBuf| {
        let settings = OnnxSettings { library: Some(library.clone()), ..OnnxSettings::new(model, [8, 8]) };
        let reward = OnnxReward::new(settings).expect("opens");
        reward.prepare().expect("fits");
        (values(&reward.score(&samples(&clips(3, SMALL)))), reward.largest_batching().expect("batches").batch_size)
    };
    let ((one, largest), (any, _)) = (of(for_one_image(folder.path())), of(fixture("scorer.onnx")));
    assert_eq!(largest, 1);
    assert!(one.iter().zip(&any).all(|(a, b)| (a - b).abs() < 1e-6), "{one:?} {any:?}");
}

#[test]
fn what_does_not_fit_is_said() {
    let Some(library) = fetched("libonnxruntime.so") else { return };
    let clips = clips(1, SMALL);
    let settings = OnnxSettings { library: Some(library.clone()), ..OnnxSettings::new(fixture("scorer.onnx"), [8, 8]) };
    let reward = OnnxReward::new(OnnxSettings { output: 2, ..settings.clone() }).expect("opens");
    let error = reward.prepare().expect_err("no third number").to_string();
    assert!(error.contains("`output` is `2`, and the network gives 2 numbers") && error.contains("hint: `size`"), "{error}");
    let error = reward.score(&samples(&clips)).remove(0).expect_err("no third number").to_string();
    assert!(error.contains("`output` is `2`, and the network gives 2 numbers"), "{error}");
    let error = OnnxReward::new(OnnxSettings { model: fixture("nothing.onnx"), ..settings.clone() }).map(drop).expect_err("no file");
    assert_eq!(error.field, "model");
    let error = OnnxReward::new(OnnxSettings { model: fixture("make_scorer.py"), ..settings }).map(drop).expect_err("no network");
    assert!(error.message.contains("make_scorer.py"), "{error}");
    let ocr = OcrSettings { library: Some(library), ..OcrSettings::new(fixture("scorer.onnx")) };
    let error = OcrReward::new(ocr).map(drop).expect_err("no alphabet");
    assert!(error.message.contains("`character`"), "{error}");
}

fn ocr(detector: bool) -> Option<OcrReward> {
    let mut settings = OcrSettings::new(fetched("recogniser.onnx")?);
    settings.library = Some(fetched("libonnxruntime.so")?);
    settings.detector = if detector { Some(fetched("detector.onnx")?) } else { None };
    Some(OcrReward::new(settings).expect("opens"))
}

#[test]
fn signs_are_read_and_other_words_score_less() {
    let Some(reward) = ocr(false) else { return };
    let clips = clips(60, SMALL);
    let right = values(&reward.score(&samples(&clips)));
    let perfect = right.iter().filter(|&&value| value == 1.0).count();
    assert!(perfect >= 58, "{perfect} of 60 read perfectly in all frames: {right:?}");
    let shifted: Vec<Sample<'_>> = clips.iter().zip(clips.iter().cycle().skip(1)).map(|((_, f), (p, _))| Sample::new(p, f)).collect();
    let wrong = values(&reward.score(&shifted));
    assert!(wrong.iter().sum::<f64>() < 0.4 * right.iter().sum::<f64>(), "{wrong:?}");
}

#[test]
fn a_detector_finds_the_word_in_a_large_frame() {
    let Some(reward) = ocr(true) else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let signs = held_out_signs();
    let clips: Vec<(String, Frames)> = (0..6)
        .map(|i| {
            let sign = signs[i * 17 % signs.len()];
            let small = render_sign(&sign, &mut rng, &RenderOptions { num_frames: 1, height: 64, width: 128 });
            (sign.to_string(), on_canvas(&small, [20 + 30 * i, 40], [320, 256]))
        })
        .collect();
    let scores = values(&reward.score(&samples(&clips)));
    assert!(scores.iter().filter(|&&value| value == 1.0).count() >= 5, "{scores:?}");
    // The same frames read whole, as one line, are illegible: the detector does the work.
    let whole = values(&ocr(false).expect("fetched").score(&samples(&clips)));
    assert!(whole.iter().sum::<f64>() < scores.iter().sum::<f64>(), "{whole:?}");
}

/// A picture at [left, top] of a larger one [width, height] of the same background.
fn on_canvas(small: &Frames, [left, top]: [usize; 2], [width, height]: [usize; 2]) -> Frames {
    let mut data: Vec<f32> = shapes::BACKGROUND.repeat(width * height);
    let left = left.min(width - small.width());
    for (row, pixels) in small.frame(0).chunks_exact(small.width() * 3).enumerate() {
        let from = ((top + row) * width + left) * 3;
        data[from..from + pixels.len()].copy_from_slice(pixels);
    }
    Frames::new(1, height, width, data).expect("frames")
}

#[test]
fn prompts_without_quotes_are_refused_before_a_run() {
    let Some(reward) = ocr(false) else { return };
    assert!(reward.check_prompt("a sign says \"CAT\"").is_ok());
    let error = reward.check_prompt("a cat").expect_err("nothing to read").to_string();
    assert!(error.contains("put the text in double quotes"), "{error}");
    assert!(reward.identity().is_some_and(|identity| identity.starts_with("ocr ")));
}
