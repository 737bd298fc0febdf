//! Tokenizer, text encoder and prompt embeddings against the reference (golden/README.md) and their own laws.

mod common;

use burn::tensor::{DType, Tensor};
use common::device::{allowed, device, on_cpu};
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use wan::text::{PromptEmbeds, PromptTokenizer, TextEncoder, prompt_clean};
use wan::umt5::{Positions, Umt5Config, Umt5Encoder, relative_position_bucket};
use wan::weights::{WeightFiles, Weights};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(path)
}

fn text_encoder() -> TextEncoder {
    TextEncoder::load(&golden("wan-tiny"), &device(), DType::F32).expect("wan-tiny loads")
}

fn reference() -> WeightFiles {
    WeightFiles::open_file(&golden("text_encoder.safetensors")).expect("golden file")
}

fn values<const D: usize>(x: &Tensor<D>) -> Vec<f32> {
    x.clone().inner().into_data().convert::<f32>().try_into_vec().expect("floats")
}

fn integers(name: &str) -> Vec<i32> {
    reference().data(name).expect("in the file").try_into_vec().expect("int32")
}

/// The three prompts of the golden file as ids without padding.
fn golden_ids() -> Vec<Vec<u32>> {
    let (ids, mask) = (integers("input_ids"), integers("attention_mask"));
    let rows = ids.chunks_exact(512).zip(mask.chunks_exact(512));
    rows.map(|(ids, mask)| ids.iter().zip(mask).filter(|&(_, &m)| m == 1).map(|(&id, _)| id as u32).collect()).collect()
}

/// Largest difference relative to the largest reference value; the tolerance is that of golden/README.md.
#[track_caller]
fn assert_close(name: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{name}: number of elements");
    let scale = expected.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(f64::from(worst) <= allowed(5e-6) * f64::from(scale), "{name}: off by {worst:e}, largest value {scale}");
}

#[derive(serde::Deserialize)]
struct TokenCases {
    max_length: usize,
    items: Vec<TokenCase>,
}

#[derive(serde::Deserialize)]
struct TokenCase {
    prompt: String,
    cleaned: String,
    ids: Vec<u32>,
    tokens: Vec<String>,
}

#[test]
fn matches_reference_tokens() {
    let text = std::fs::read_to_string(golden("text_tokens.json")).expect("golden file");
    let cases: TokenCases = serde_json::from_str(&text).expect("valid");
    let tokenizer = PromptTokenizer::load(&golden("wan-tiny/tokenizer")).expect("tokenizer");
    for case in &cases.items {
        assert_eq!(prompt_clean(&case.prompt), case.cleaned);
        let ids = tokenizer.encode(&case.prompt, cases.max_length).expect("encodes");
        assert_eq!(ids, case.ids, "{}", case.prompt);
        let tokens: Vec<String> = ids.iter().filter_map(|&id| tokenizer.token(id)).collect();
        assert_eq!(tokens, case.tokens, "{}", case.prompt);
    }
}

#[test]
fn matches_reference_relative_position_buckets() {
    let expected = integers("relative_position_bucket_200");
    for (i, &bucket) in expected.iter().enumerate() {
        let (query, key) = (i / 200, i % 200);
        assert_eq!(relative_position_bucket(query, key, 32, 128), bucket as usize, "query {query}, key {key}");
    }
}

#[test]
fn matches_reference_inside_the_encoder() {
    let (encoder, reference, ids) = (text_encoder().encoder, reference(), golden_ids());
    let lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
    let floats = |name: &str| reference.floats(name).expect("in the file");
    let first_40 = |x: Tensor<3>| values(&x.slice_dim(1, 0..40));

    let embedded = encoder.embed(&ids, 512, false);
    assert_close("embed", &first_40(embedded.clone()), &floats("embed.first_40_rows"));
    let positions = Positions::new(&encoder.config, 512, &lengths, &device());
    let block0 = encoder.blocks[0].forward(embedded, &positions);
    assert_close("block0", &first_40(block0), &floats("block0.first_40_rows"));
    let all = encoder.forward_padded(&ids, 512, false);
    assert_close("last_hidden_state", &first_40(all), &floats("raw_last_hidden_state.first_40_rows"));

    let eight = Positions::new(&encoder.config, 8, &[8], &device());
    let bias = encoder.blocks[0].position_bias(&eight);
    assert_eq!(bias.dims(), [1, 4, 8, 8]);
    assert_close("position_bias", &values(&bias), &floats("block0.position_bias_8"));
}

/// One layer in memory at a time; and a prompt's embedding does not depend on the prompts beside it.
#[test]
fn matches_reference_in_stages() {
    let (reference, ids) = (reference(), golden_ids());
    let encode =
        |ids: &[Vec<u32>]| wan::umt5::encode_in_stages(&golden("wan-tiny/text_encoder"), ids, &device(), &mut |_, _| {}).expect("encodes");
    let together = encode(&ids);
    let embeds = wan::text::PromptEmbeds::from_rows(together.clone(), 512);
    assert_close("prompt_embeds", &values(&embeds.to_padded()), &reference.floats("prompt_embeds").expect("in the file"));
    for (ids, embeds) in ids.iter().zip(together) {
        let alone = wan::weights::to_floats(encode(std::slice::from_ref(ids)).remove(0));
        let beside_others = wan::weights::to_floats(embeds);
        if on_cpu() {
            assert_eq!(alone, beside_others);
        } else {
            assert_close("alone", &alone, &beside_others);
        }
    }
    assert!(wan::umt5::encode_in_stages(&golden("wan-tiny/text_encoder"), &[vec![384]], &device(), &mut |_, _| {}).is_err());
}

#[test]
fn matches_reference_without_padding() {
    let ids: Vec<u32> = integers("short.input_ids").into_iter().map(|id| id as u32).collect();
    let hidden = text_encoder().encoder.forward(&[ids], false);
    assert_close("short", &values(&hidden), &reference().floats("short.last_hidden_state").expect("in the file"));
}

#[test]
fn matches_reference_prompt_embeds() {
    let encoder = text_encoder();
    let text = std::fs::read_to_string(golden("text_tokens.json")).expect("golden file");
    let cases: TokenCases = serde_json::from_str(&text).expect("valid");
    let prompts: Vec<&str> = cases.items[..3].iter().map(|case| case.prompt.as_str()).collect();
    let embeds = encoder.encode(&prompts, 512).expect("encodes");
    assert_eq!(embeds.lengths, golden_ids().iter().map(Vec::len).collect::<Vec<_>>());
    assert!(embeds.embeds.dims()[1] < 512);
    let expected = reference().floats("prompt_embeds").expect("in the file");
    assert_close("prompt_embeds", &values(&embeds.to_padded()), &expected);
    let empty = encoder.encode(&[""], 512).expect("encodes");
    let expected = reference().floats("empty_prompt_embeds").expect("in the file");
    assert_close("empty_prompt_embeds", &values(&empty.to_padded()), &expected);
}

#[test]
fn rows_do_not_depend_on_padding_or_neighbours() {
    let (encoder, ids) = (text_encoder().encoder, golden_ids());
    let together = encoder.forward(&ids, false);
    for (b, row) in ids.iter().enumerate() {
        let alone = encoder.forward(std::slice::from_ref(row), false);
        let padded = encoder.forward_padded(std::slice::from_ref(row), 512, false).slice_dim(1, 0..row.len());
        let batch = together.clone().slice([b..b + 1, 0..row.len()]);
        assert_close("alone, padded", &values(&padded), &values(&alone));
        assert_close("alone, in a batch", &values(&batch), &values(&alone));
    }
}

fn random_encoder(seed: u64) -> Umt5Encoder {
    let config = Umt5Config::load(&golden("wan-tiny/text_encoder")).expect("config");
    Umt5Encoder::new(config, &Weights::random(seed, &device())).expect("random weights always fit")
}

#[test]
fn gradients_reach_every_parameter() {
    let encoder = random_encoder(3);
    encoder.params.set_trainable(true);
    let ids = golden_ids();
    let hidden = encoder.forward(&ids, true);
    let grads = hidden.powi_scalar(3).sum().backward();
    for slot in encoder.params.iter() {
        let grad = slot.leaf().grad(&grads).unwrap_or_else(|| panic!("no gradient for `{}`", slot.name));
        let norm: f32 = values(&grad).iter().map(|g| g * g).sum();
        assert!(norm.is_finite() && norm > 0.0, "gradient of `{}` is {norm}", slot.name);
    }
}

#[test]
fn nothing_is_recorded_unless_asked_and_values_agree() {
    let encoder = random_encoder(4);
    encoder.params.set_trainable(true);
    let (plain, recorded) = (encoder.forward(&golden_ids(), false), encoder.forward(&golden_ids(), true));
    assert!(!plain.is_autodiff() && recorded.is_autodiff());
    // not bit for bit: under autodiff the engine takes other kernels (softmax)
    assert_close("recorded", &values(&recorded), &values(&plain));
}

#[test]
fn random_start_has_the_scale_of_t5() {
    let hidden = values(&random_encoder(5).forward(&golden_ids()[..1], false));
    let rms = (hidden.iter().map(|v| v * v).sum::<f32>() / hidden.len() as f32).sqrt();
    assert!((rms - 1.0).abs() < 1e-2, "the final norm gives unit rows, got {rms}");
}

#[test]
fn either_name_of_the_embedding_is_read() {
    let source = WeightFiles::open_folder(&golden("wan-tiny/text_encoder"), "model").expect("weights");
    let tensors = |embedding: &[&str]| {
        let mut all = std::collections::BTreeMap::new();
        for name in source.names() {
            let tensor = (source.shape(name).expect("listed"), source.floats(name).expect("float"));
            let targets = if name == "shared.weight" { embedding.to_vec() } else { vec![name] };
            all.extend(targets.into_iter().map(|target| (target.to_owned(), tensor.clone())));
        }
        all
    };
    let expected = values(&text_encoder().encoder.forward(&golden_ids(), false));
    let dir = tempfile::tempdir().expect("temporary folder");
    std::fs::copy(golden("wan-tiny/text_encoder/config.json"), dir.path().join("config.json")).expect("copied");
    let both = ["shared.weight", "encoder.embed_tokens.weight"];
    for names in [&both[..1], &both[1..], &both[..]] {
        wan::weights::write_safetensors(&dir.path().join("model.safetensors"), &tensors(names), None).expect("written");
        let encoder = Umt5Encoder::load(dir.path(), &device(), DType::F32).expect("loads");
        assert_eq!(values(&encoder.forward(&golden_ids(), false)), expected, "{names:?}");
    }
    wan::weights::write_safetensors(&dir.path().join("model.safetensors"), &tensors(&[]), None).expect("written");
    let message = Umt5Encoder::load(dir.path(), &device(), DType::F32).expect_err("no embedding").to_string();
    assert!(message.contains("missing (1)") && message.contains("shared.weight"), "{message}");
}

#[test]
fn bf16_is_close_to_f32() {
    let ids = golden_ids();
    let exact = values(&text_encoder().encoder.forward(&ids, false));
    let dir = golden("wan-tiny/text_encoder");
    let rounded = Umt5Encoder::load(&dir, &device(), DType::BF16).expect("loads").forward(&ids, false);
    assert_eq!(rounded.dtype(), DType::BF16);
    let mean = values(&rounded).iter().zip(&exact).map(|(a, b)| (a - b).abs()).sum::<f32>() / exact.len() as f32;
    assert!(mean < 0.02, "mean difference {mean}");
}

#[test]
fn tokenizer_errors_name_the_file() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let load = || PromptTokenizer::load(dir.path()).expect_err("refused").to_string();
    assert!(load().contains("tokenizer.json"), "{}", load());
    std::fs::write(dir.path().join("tokenizer.json"), "{\"version\": 1").expect("written");
    assert!(load().contains("tokenizer.json") && load().contains("not a tokenizer"), "{}", load());
    let mut json: serde_json::Value = serde_json::from_str(&wan::text::word_tokenizer_json(&["red"])).expect("valid JSON");
    json["post_processor"] = serde_json::Value::Null;
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).expect("written");
    assert!(load().contains("does not append `</s>`"), "{}", load());
    let tokenizer = PromptTokenizer::load(&golden("wan-tiny/tokenizer")).expect("tokenizer");
    let message = tokenizer.encode("fox", 0).expect_err("refused").to_string();
    assert!(message.contains("max_sequence_length is `0`"), "{message}");
}

const WORDS: [&str; 7] = ["a", "red", "circle", "moves", "right", "dog", "red"];

#[test]
fn words_are_single_tokens() {
    let json = wan::text::word_tokenizer_json(&WORDS);
    let tokenizer = PromptTokenizer::from_json(&json, Path::new("words")).expect("valid");
    assert_eq!(tokenizer.vocab_size(), wan::text::word_tokenizer_vocab_size(&WORDS));
    // transformers (AutoTokenizer, 5.24.0) gives the same ids for both texts
    assert_eq!(tokenizer.encode("a red circle moves right", 512).expect("encodes"), [3, 4, 5, 6, 7, 1]);
    let spelled = tokenizer.encode("A RED dog, moves!", 512).expect("encodes");
    assert_eq!(spelled, [9, 42, 9, 59, 46, 45, 8, 21, 6, 10, 1]);
    let tokens: Vec<String> = spelled.iter().filter_map(|&id| tokenizer.token(id)).collect();
    assert_eq!(tokens, ["▁", "A", "▁", "R", "E", "D", "▁dog", ",", "▁moves", "!", "</s>"]);
    assert_eq!(tokenizer.encode("a red circle", 3).expect("encodes"), [3, 4, 1]);
}

/// Prompts of the given lengths whose elements are all different from zero and from each other.
fn prompts(lengths: &[usize], padded_length: usize, first: f32) -> Tensor<3> {
    let mut next = first;
    let mut row = |used: bool| {
        next += 1.0;
        if used { [next, 0.0, -next] } else { [0.0; 3] }
    };
    let rows = lengths.iter().flat_map(|&n| (0..padded_length).map(move |i| i < n));
    let elements: Vec<f32> = rows.flat_map(&mut row).collect();
    Tensor::<1>::from_floats(elements.as_slice(), &device()).reshape([lengths.len(), padded_length, 3])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn padding_can_be_dropped_and_restored(lengths in prop::collection::vec(0_usize..=6, 1..5)) {
        let padded = prompts(&lengths, 6, 0.0);
        let embeds = PromptEmbeds::from_padded(padded.clone());
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        prop_assert_eq!(&embeds.lengths, &lengths);
        prop_assert_eq!(embeds.embeds.dims(), [lengths.len(), longest, 3]);
        prop_assert_eq!(embeds.padded_length, 6);
        prop_assert_eq!(values(&embeds.to_padded()), values(&padded));
    }

    #[test]
    fn selection_is_row_by_row(
        (lengths, indices) in prop::collection::vec(0_usize..=6, 1..5)
            .prop_flat_map(|lengths| { let n = lengths.len(); (Just(lengths), prop::collection::vec(0..n, 1..7)) })
    ) {
        let all = PromptEmbeds::from_padded(prompts(&lengths, 6, 0.0));
        let chosen = all.select(&indices);
        let longest = chosen.lengths.iter().copied().max().unwrap_or(0).max(1);
        prop_assert_eq!(chosen.batch_size(), indices.len());
        prop_assert_eq!(chosen.embeds.dims()[1], longest);
        let (from, to) = (values(&all.to_padded()), values(&chosen.to_padded()));
        for (row, &i) in to.chunks_exact(18).zip(&indices) {
            prop_assert_eq!(row, &from[i * 18..(i + 1) * 18]);
        }
    }

    #[test]
    fn halves_of_a_concatenation_are_its_parts(
        a in prop::collection::vec(0_usize..=6, 1..4), b in prop::collection::vec(0_usize..=6, 1..4)
    ) {
        let (first, second) = (prompts(&a, 6, 0.0), prompts(&b, 6, 100.0));
        let (first, second) = (PromptEmbeds::from_padded(first), PromptEmbeds::from_padded(second));
        let both = PromptEmbeds::cat(&first, &second);
        prop_assert_eq!(both.batch_size(), a.len() + b.len());
        let whole = [values(&first.to_padded()), values(&second.to_padded())].concat();
        prop_assert_eq!(values(&both.to_padded()), whole);
        let again: Vec<usize> = (a.len()..a.len() + b.len()).collect();
        let back = both.select(&again);
        prop_assert_eq!(values(&back.embeds), values(&second.embeds));
        prop_assert_eq!(back.lengths, second.lengths);
    }
}
