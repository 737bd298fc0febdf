//! Prompt cleaning, as the reference pipeline does it before the tokenizer.

/// Repairs text (mojibake, full-width punctuation, curly quotes: the job of Python's `ftfy`), decodes HTML entities
/// twice, and makes every run of white space one blank.
///
/// Differs from the reference in what no prompt should contain: entities without their semicolon (`&copy 2020`) and
/// numeric ones that are no character (`&#0;`) stay as they are, and of a terminal escape only the escape character goes.
///
/// ```
/// assert_eq!(wan::text::prompt_clean(" it&amp;#39;s \n “calm” "), "it's \"calm\"");
/// ```
pub fn prompt_clean(prompt: &str) -> String {
    let fixed = plsfix::fix_text(prompt, None);
    let once = html_escape::decode_html_entities(&fixed);
    let twice = html_escape::decode_html_entities(&once);
    let words: Vec<&str> = twice.split(is_white_space).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

/// White space as Python's `\s` has it: Unicode's, and the four ASCII separators.
fn is_white_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
