//! `flash-grpo`, the command.
//!
//! Every subcommand is one file of [`commands`]; this file only dispatches and reports errors.
// A command talks to its user: results go to stdout, everything else to stderr.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod commands;
mod device;
mod outputs;
mod precision;
mod progress;
mod signals;
mod watch;

use args::{Args, Command};
use clap::Parser;
use std::process::ExitCode;

/// Large temporaries come and go with every operation: an allocator that keeps them saves page faults.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What a user can put right: input, files, settings. (clap uses the same code for the command line.)
const BAD_INPUT: u8 = 2;

/// 128 + SIGPIPE, as a shell reports it.
const NO_READER: i32 = 141;

fn main() -> ExitCode {
    leave_quietly_without_a_reader();
    // The main thread works in the pool too, instead of waking the others and waiting for them. Fails only if a pool exists, which
    // then serves as well.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let interrupted = interruption(&error);
            eprintln!("{}{}", if interrupted.is_some() { "" } else { "error: " }, message(&error));
            ExitCode::from(interrupted.unwrap_or(BAD_INPUT))
        }
    }
}

/// Where whoever read the output has gone, as `head` does, the program ends as SIGPIPE would end it. The signal itself stays ignored: pipes to
/// rewards break too, and that is no reason to end.
fn leave_quietly_without_a_reader() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let is_unread = |text: &str| text.starts_with("failed printing to std") && text.contains("Broken pipe");
        if panic.payload_as_str().is_some_and(is_unread) {
            std::process::exit(NO_READER);
        }
        report(panic);
    }));
}

/// 128 + signal, as a shell reports it, if a signal ended the run.
fn interruption(error: &anyhow::Error) -> Option<u8> {
    match error.downcast_ref::<train::Error>() {
        Some(train::Error::Interrupted { signal, .. }) => u8::try_from(128 + signal).ok(),
        _ => None,
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Train(args) => commands::train::run_command(&args),
        Command::Eval(args) => commands::eval::run_command(&args),
        Command::Inspect(args) => commands::inspect::run_command(&args),
        Command::Plan(args) => commands::plan::run_command(&args),
        Command::Replay(args) => commands::replay::run_command(&args),
        Command::Pretrain(args) => commands::pretrain::run_command(&args),
        Command::Compare(args) => commands::compare::run_command(&args),
        Command::Report(args) => commands::report::run_command(&args),
        Command::Reward(args) => commands::reward::run_command(&args),
        Command::Doctor(args) => commands::doctor::run_command(&args),
        #[cfg(feature = "download")]
        Command::Download(args) => commands::download::run_command(&args),
        Command::RandomModel(args) => commands::random_model::run_command(&args),
        Command::Sample(args) => commands::sample::run(&args),
    }
}

/// The chain of causes as `{:#}` prints it, without causes that the text before already tells.
fn message(error: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}
