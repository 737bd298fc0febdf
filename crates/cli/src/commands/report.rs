//! `flash-grpo report`: one HTML file about runs and comparisons.

use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wan::weights::write_atomically;

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Folders of runs and of comparisons, finished or not. Several share one page, with the curves of all runs in common charts.
    #[arg(value_name = "FOLDER", required = true)]
    folders: Vec<PathBuf>,
    /// The page [default: report.html, in the folder if there is one, else in the current one].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write it anew every so many seconds, until everything is over.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "10")]
    watch: Option<u64>,
}

/// Name of the page in a run or comparison folder.
pub const PAGE: &str = "report.html";

/// Runs the command.
///
/// # Errors
/// A folder that holds neither a run nor a comparison; a page that cannot be written.
pub fn run_command(args: &ReportArgs) -> Result<()> {
    let output = args.output.clone().unwrap_or_else(|| match args.folders.as_slice() {
        [folder] => folder.join(PAGE),
        _ => PAGE.into(),
    });
    let over = || Ok(args.watch.is_none() || all_over(&args.folders)?);
    let mut said = false;
    let write = || {
        write_page(&args.folders, &output)?;
        if !std::mem::replace(&mut said, true) {
            println!("wrote {}", output.display());
        }
        Ok(())
    };
    write_until(over, write, Duration::from_secs(args.watch.unwrap_or_default().max(1)))
}

/// Writes again and again, and for the last time once it is over: what ends while a page is written is on the next one.
fn write_until(over: impl Fn() -> Result<bool>, mut write: impl FnMut() -> Result<()>, pause: Duration) -> Result<()> {
    loop {
        let last = over()?;
        write()?;
        if last {
            return Ok(());
        }
        std::thread::sleep(pause);
    }
}

fn all_over(folders: &[PathBuf]) -> Result<bool> {
    for folder in folders {
        if !report::load::is_over(folder)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes the page about the run or the comparison in `folder`.
///
/// # Errors
/// As [`run_command`].
pub fn write_report(folder: &Path, output: &Path) -> Result<()> {
    write_page(&[folder], output)
}

fn write_page(folders: &[impl AsRef<Path>], output: &Path) -> Result<()> {
    let place = output.parent().filter(|place| !place.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(write_atomically(output, report::html(folders, place)?.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_run_that_ends_while_its_page_is_written_gets_another_page() {
        let over = Cell::new(false);
        let mut pages = Vec::new();
        let write = || {
            pages.push(over.get());
            over.set(true);
            Ok(())
        };
        write_until(|| Ok(over.get()), write, Duration::ZERO).expect("written");
        assert_eq!(pages, [false, true]);
    }
}
