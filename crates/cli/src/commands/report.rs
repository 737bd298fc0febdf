//! `flash-grpo report`: one HTML file about a run.

use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wan::weights::write_atomically;

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The folder of a run, finished or not.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// The page [default: report.html in the run's folder].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write it anew every so many seconds, until the run is over.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "10")]
    watch: Option<u64>,
}

/// Name of the page in a run or comparison folder.
pub const PAGE: &str = "report.html";

/// Runs the command.
///
/// # Errors
/// A folder that holds no run; a page that cannot be written.
pub fn run_command(args: &ReportArgs) -> Result<()> {
    let output = args.output.clone().unwrap_or_else(|| args.run.join(PAGE));
    write_report(&args.run, &output)?;
    println!("wrote {}", output.display());
    let Some(seconds) = args.watch else { return Ok(()) };
    while !args.run.join("summary.json").exists() {
        std::thread::sleep(Duration::from_secs(seconds.max(1)));
        write_report(&args.run, &output)?;
    }
    Ok(())
}

/// Writes the page about the run in `folder`.
///
/// # Errors
/// As [`run_command`].
pub fn write_report(folder: &Path, output: &Path) -> Result<()> {
    Ok(write_atomically(output, report::html(folder)?.as_bytes())?)
}
