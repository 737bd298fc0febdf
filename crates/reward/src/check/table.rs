//! The check as text.

use std::fmt;

use super::RewardCheck;

impl fmt::Display for RewardCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} samples, {} errors", self.name, self.samples, self.errors)?;
        if !self.scores() {
            return writeln!(f, "  nothing could be scored: {}", self.first_error.as_deref().unwrap_or("there were no samples"));
        }
        if let Some([median, p95]) = self.latency_s.map(|latency| latency.map(|seconds| 1000.0 * seconds)) {
            writeln!(f, "  latency        {median:.1} ms (median), {p95:.1} ms (95 %)")?;
        }
        for t in &self.throughput {
            let speed = match t.errors {
                0 => format!("{:.1} samples/s", t.samples_per_s),
                errors => format!("{errors} samples could not be scored"),
            };
            let chosen = if self.recommended == Some(*t) { "  <- enough" } else { "" };
            writeln!(f, "  throughput     {:>3} a request, {:>2} at once: {speed}{chosen}", t.batch_size, t.concurrency)?;
        }
        match self.noise {
            Some(0.0) => writeln!(f, "  repeatable     yes, bit for bit")?,
            Some(noise) => writeln!(f, "  repeatable     no, a repetition deviates by {noise:.3e}")?,
            None => writeln!(f, "  repeatable     unknown: no video was scored twice")?,
        }
        match self.group_spread {
            Some(spread) => writeln!(f, "  spread         {spread:.3e} among the videos of a prompt")?,
            None => writeln!(f, "  spread         unknown: no prompt has two videos")?,
        }
        for ranking in &self.ranking {
            let (good, bad) = (ranking.good, ranking.bad);
            writeln!(f, "  good above     {:<14} auc {:.3}  (mean {good:.4} and {bad:.4})", ranking.against, ranking.auc)?;
        }
        self.warnings.iter().try_for_each(|warning| writeln!(f, "  warning: {warning}"))
    }
}
