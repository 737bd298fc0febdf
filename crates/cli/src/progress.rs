//! Progress bars on stderr; nothing is drawn where stderr is no terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// A bar of `total` steps with an estimate of the time left.
pub fn bar(label: impl Into<std::borrow::Cow<'static, str>>, total: usize) -> ProgressBar {
    styled(ProgressBar::new(total as u64), "{msg:<12} {wide_bar} {pos}/{len}  {elapsed} (left: {eta})").with_message(label.into())
}

/// A bar of `total` bytes.
#[cfg(feature = "download")]
pub fn bytes(label: String, total: u64) -> ProgressBar {
    styled(ProgressBar::new(total), "{msg}  {wide_bar} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec} (left: {eta})")
        .with_message(label)
}

/// A sign of life for a phase of unknown length.
pub fn spinner(label: &'static str) -> ProgressBar {
    let spinner = styled(ProgressBar::new_spinner(), "{msg:<12} {spinner} {elapsed}").with_message(label);
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
