//! The text that should be legible, and how near another comes to it.

/// Why there is none.
pub(super) const MISSING: &str = "it does not say what should be legible: put the text in double quotes, as in `a sign says \"CAT\"`";

/// What stands in the first pair of double quotes, straight or curly; `None` if that is nothing, or only blanks.
pub(super) fn quoted(prompt: &str) -> Option<&str> {
    let quote = |c: char| matches!(c, '"' | '\u{201c}' | '\u{201d}');
    let (_, rest) = prompt.split_once(quote)?;
    let (text, _) = rest.split_once(quote)?;
    (!text.trim().is_empty()).then_some(text)
}

/// `1 - min(d, n) / n` with the edit distance d and the target's length n in characters, in lower case and without blanks; 1 as soon as `text`
/// contains the target, if what surrounds it is free.
pub(super) fn similarity(text: &str, target: &str, allow_surrounding: bool) -> f64 {
    let (text, target) = (plain(text), plain(target));
    if allow_surrounding && text.contains(&target) {
        return 1.0;
    }
    let length = target.chars().count().max(1);
    let distance = strsim::levenshtein(&text, &target).min(length);
    1.0 - distance as f64 / length as f64
}

fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_the_quoted_text() {
        assert_eq!(quoted("a sign says \"CAT\" in \"red\""), Some("CAT"));
        assert_eq!(quoted("a shop called \u{201c}New York\u{201d}"), Some("New York"));
        assert_eq!(quoted("a sign says \"CAT"), None);
        assert_eq!(quoted("a sign says \"  \""), None);
        assert_eq!(quoted("a cat"), None);
    }

    #[test]
    fn near_misses_earn_something() {
        assert_eq!(similarity("c AT", "Cat", false), 1.0);
        assert!((similarity("CAR", "CAT", false) - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(similarity("", "CAT", false), 0.0);
        assert_eq!(similarity("something else entirely", "CAT", false), 0.0);
        assert!((similarity("XCAT", "CAT", false) - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(similarity("XCAT", "CAT", true), 1.0);
    }

    proptest! {
        #[test]
        fn between_0_and_1_and_1_for_the_target_alone(text in "\\PC{0,12}", target in "[A-Za-z0-9]{1,8}") {
            let value = similarity(&text, &target, false);
            prop_assert!((0.0..=1.0).contains(&value));
            prop_assert_eq!(value == 1.0, plain(&text) == plain(&target));
            prop_assert!(similarity(&text, &target, true) >= value);
        }
    }
}
