//! A tokenizer for a small closed vocabulary, as the moving-shapes world has: every word one token.

use serde_json::{Value, json};

/// The text of a `tokenizer.json` in which each of `words` is one token.
///
/// A Unigram model as T5 has it: `<pad>` 0, `</s>` 1 (appended to every text), `<unk>` 2, then the words, then the
/// printable ASCII characters at a score so low that they only spell what is not a word. Repeated words count once.
///
/// # Panics
/// If a word is empty or contains white space.
pub fn word_tokenizer_json(words: &[&str]) -> String {
    let special = |(id, content): (usize, &&str)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let metaspace = json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": true});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let second = json!({"Sequence": {"id": "B", "type_id": 0}});
    let end = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": SPECIAL.iter().enumerate().map(special).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [text, end],
            "pair": [text, end, second, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": vocab(words), "byte_fallback": false},
    });
    format!("{json:#}\n")
}

/// Number of tokens of [`word_tokenizer_json`]: the smallest `vocab_size` for its encoder.
///
/// # Panics
/// As [`word_tokenizer_json`].
pub fn word_tokenizer_vocab_size(words: &[&str]) -> usize {
    vocab(words).len()
}

/// The `tokenizer_config.json` that goes with [`word_tokenizer_json`]: with both files in a folder, `transformers`
/// reads the same tokenizer (`AutoTokenizer.from_pretrained`).
pub const WORD_TOKENIZER_CONFIG_JSON: &str = r#"{
  "backend": "tokenizers",
  "eos_token": "</s>",
  "extra_ids": 0,
  "model_max_length": 512,
  "pad_token": "<pad>",
  "tokenizer_class": "T5Tokenizer",
  "unk_token": "<unk>"
}
"#;

const SPECIAL: [&str; 3] = ["<pad>", "</s>", "<unk>"];
/// Stands for the blank in front of every word.
const SPACE: &str = "\u{2581}";

/// Log-probability of a word, and of a character; any word beats the spelling of its shortest form, blank and letter.
const WORD_SCORE: f64 = -1.0;
const CHARACTER_SCORE: f64 = -10.0;

/// Pairs of piece and score; the index is the id.
fn vocab(words: &[&str]) -> Vec<Value> {
    let mut seen = std::collections::HashSet::new();
    let words = words.iter().filter(|word| seen.insert(**word)).map(|word| {
        assert!(!word.is_empty() && !word.contains(char::is_whitespace), "`{word}` is not one word");
        json!([format!("{SPACE}{word}"), WORD_SCORE])
    });
    let characters = ('!'..='~').map(|c| json!([c, CHARACTER_SCORE]));
    let special = SPECIAL.iter().map(|token| json!([token, 0.0]));
    special.chain(words).chain([json!([SPACE, CHARACTER_SCORE])]).chain(characters).collect()
}
