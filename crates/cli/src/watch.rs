//! A run's events as progress bars and lines on stderr.

use crate::progress;
use indicatif::ProgressBar;
use train::events::Event;

/// Draws a bar per phase where stderr is a terminal, and one line per iteration.
#[derive(Debug, Default)]
pub struct Bars {
    quiet: bool,
    bar: Option<ProgressBar>,
}

impl Bars {
    /// Bars and warnings only.
    pub fn quiet() -> Self {
        Self { quiet: true, ..Self::default() }
    }

    /// A line above the bar.
    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Shows one event.
    pub fn show(&mut self, event: Event<'_>) {
        match event {
            Event::Phase { name, total } => self.bar = Some(progress::bar(name.to_owned(), total as usize)),
            Event::Progress(done) => {
                if let Some(bar) = &self.bar {
                    bar.set_position(done);
                }
            }
            Event::Done => {
                if let Some(bar) = self.bar.take() {
                    bar.finish_and_clear();
                }
            }
            Event::Iteration(_) | Event::Note(_) if self.quiet => {}
            Event::Iteration(m) => self.line(&format!(
                "iteration {:>4}  reward {:.3} (spread within groups {:.3})  grad norm {:.3}  clipped {:.2}  ratio deviation {:e}",
                m.iteration, m.reward_mean, m.reward_group_std, m.grad_norm, m.clip_fraction, m.ratio_deviation
            )),
            Event::Note(text) => self.line(text),
            Event::Warning(text) => self.line(&format!("warning: {text}")),
        }
    }
}
