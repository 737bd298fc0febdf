//! `flash-grpo download`: fetches a model from the hub.

use crate::progress;
use anyhow::Result;
use clap::Args;
use indicatif::ProgressBar;
use wan::hub::Hub;

/// Arguments of `download`.
#[derive(Debug, Args)]
pub struct DownloadArgs {
    /// The model, `organisation/name`, optionally with `@revision`; what `model.path` of a recipe then may say.
    #[arg(value_name = "MODEL")]
    model: String,
}

/// Runs the command.
///
/// # Errors
/// No such model; a server that does not answer; a cache that cannot be written.
pub fn run_command(args: &DownloadArgs) -> Result<()> {
    let hub = Hub::from_env()?;
    let mut bar: Option<(usize, ProgressBar)> = None;
    let folder = hub.download(&args.model, &mut |p| {
        if bar.as_ref().is_none_or(|(index, _)| *index != p.index) {
            if let Some((_, done)) = bar.take() {
                done.finish_and_clear();
            }
            bar = Some((p.index, progress::bytes(format!("{}/{} {}", p.index + 1, p.files, p.file), p.total)));
        }
        if let Some((_, bar)) = &bar {
            bar.set_position(p.bytes);
        }
    })?;
    if let Some((_, done)) = bar {
        done.finish_and_clear();
    }
    println!("{}", folder.display());
    Ok(())
}
