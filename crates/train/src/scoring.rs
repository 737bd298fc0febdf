//! Rewards while the next rollouts are sampled: a server that takes as long as the sampling costs nothing.

use crate::pool::help_until;
use reward::{Reward, Sample, Scored};
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use video::Frames;

/// Bytes of clips that may wait for the reward, but for a single job, which may always; then sampling waits, so that memory stays bounded.
pub(crate) const QUEUE_BYTES: usize = 1 << 30;

/// What a clip was asked to be.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The prompt.
    pub prompt: &'a str,
    /// What else its line in the prompt file says.
    pub metadata: Option<&'a Value>,
    /// Frames a second at which it is meant to play.
    pub fps: f64,
}

/// Clips to be scored together.
pub struct Job<'a> {
    /// One per clip.
    pub asked: Vec<Asked<'a>>,
    /// What came of it.
    pub clips: Vec<Frames>,
}

impl Job<'_> {
    fn bytes(&self) -> usize {
        self.clips.iter().map(|clip| size_of_val(clip.data())).sum()
    }
}

/// Where `produce` puts its jobs. They are scored in order.
pub struct Queue<'a, 'q> {
    jobs: Sender<Job<'a>>,
    /// Bytes.
    waiting: &'q AtomicUsize,
    /// Clips that could not be scored so far.
    failed: &'q AtomicUsize,
    /// Whether nobody takes jobs any more.
    closed: &'q dyn Fn() -> bool,
}

impl<'a> Queue<'a, '_> {
    /// Waits where the reward is too far behind.
    pub fn put(&self, job: Job<'a>) {
        let bytes = job.bytes();
        help_until(|| {
            let waiting = self.waiting.load(Ordering::Acquire);
            waiting == 0 || waiting + bytes <= QUEUE_BYTES || (self.closed)()
        });
        self.waiting.fetch_add(bytes, Ordering::AcqRel);
        let _ = self.jobs.send(job); // fails after a panic of the other thread, which `overlapped` passes on
    }

    /// Clips that could not be scored so far.
    pub fn failed(&self) -> usize {
        self.failed.load(Ordering::Acquire)
    }
}

/// What `produce` returns, and the scores of all jobs that it put, in that order; the jobs are scored on a thread of their own meanwhile.
pub fn overlapped<'a, T>(reward: &dyn Reward, produce: impl FnOnce(&Queue<'a, '_>) -> T) -> (T, Vec<Scored>) {
    let (waiting, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (sender, jobs) = channel();
        let scoring = scope.spawn(|| score_all(reward, jobs, &waiting, &failed));
        let made = produce(&Queue { jobs: sender, waiting: &waiting, failed: &failed, closed: &|| scoring.is_finished() });
        // there are no more jobs: the thread ends with the last
        help_until(|| scoring.is_finished());
        let scores = scoring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (made, scores)
    })
}

fn score_all(reward: &dyn Reward, jobs: Receiver<Job<'_>>, waiting: &AtomicUsize, failed: &AtomicUsize) -> Vec<Scored> {
    let taken = |job: Job<'_>| {
        waiting.fetch_sub(job.bytes(), Ordering::AcqRel);
        let scores = score(reward, &job.asked, &job.clips);
        failed.fetch_add(scores.iter().filter(|score| failure(score).is_some()).count(), Ordering::AcqRel);
        scores
    };
    jobs.iter().flat_map(taken).collect()
}

/// One score per clip.
pub fn score(reward: &dyn Reward, asked: &[Asked<'_>], clips: &[Frames]) -> Vec<Scored> {
    let sample = |(&Asked { prompt, metadata, fps }, frames)| Sample { prompt, frames, fps, metadata };
    let batch: Vec<Sample<'_>> = asked.iter().zip(clips).map(sample).collect();
    reward.score(&batch)
}

/// Why a clip has no reward, if it has none.
pub fn failure(score: &Scored) -> Option<String> {
    match score {
        Ok(score) if score.value.is_finite() => None,
        Ok(score) => Some(format!("is {}", score.value)),
        Err(error) => Some(format!("is missing: {}", error.reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reward::RewardBreakdown;
    use std::time::{Duration, Instant};

    /// A reward that takes its time, and says how bright a clip is.
    struct Slow(Duration);

    impl Reward for Slow {
        fn name(&self) -> &str {
            "slow"
        }

        fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
            std::thread::sleep(self.0);
            batch.iter().map(|sample| Ok(RewardBreakdown::from(f64::from(sample.frames.data()[0])))).collect()
        }
    }

    const ASKED: Asked<'static> = Asked { prompt: "a", metadata: None, fps: 16.0 };

    fn clip(value: usize) -> Frames {
        Frames::new(1, 1, 1, vec![value as f32; 3]).expect("frames")
    }

    /// A reward that needs the pool, whose only thread is the one that samples: as in the program on a single core.
    #[test]
    fn a_pool_of_one_thread_is_enough() {
        struct Parallel;
        impl Reward for Parallel {
            fn name(&self) -> &str {
                "parallel"
            }
            fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
                let count: usize = rayon::scope(|_| batch.len());
                batch.iter().map(|_| Ok(RewardBreakdown::from(count as f64))).collect()
            }
        }
        // a thread of its own, for the pool is for good
        let worker = std::thread::spawn(|| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().expect("a pool");
            let reward = InPool(pool, Parallel);
            let (_, scores) = overlapped(&reward, |queue| (0..8).for_each(|i| queue.put(Job { asked: vec![ASKED], clips: vec![clip(i)] })));
            scores.len()
        });
        let start = Instant::now();
        while !worker.is_finished() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(worker.is_finished(), "they wait for each other");
        assert_eq!(worker.join().expect("no panic"), 8);

        struct InPool<R>(rayon::ThreadPool, R);
        impl<R: Reward> Reward for InPool<R> {
            fn name(&self) -> &str {
                self.1.name()
            }
            fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
                self.0.install(|| self.1.score(batch))
            }
        }
    }

    /// Scores come in the order of the jobs, and no job waits for the one before it to be scored.
    #[test]
    fn scoring_overlaps_with_production() {
        let (each, jobs) = (Duration::from_millis(30), 8);
        let start = Instant::now();
        let (produced, scores) = overlapped(&Slow(each), |queue| {
            for i in 0..jobs {
                std::thread::sleep(each);
                queue.put(Job { asked: vec![ASKED; 2], clips: vec![clip(2 * i), clip(2 * i + 1)] });
            }
            start.elapsed()
        });
        let values: Vec<f64> = scores.into_iter().map(|score| score.expect("scored").value).collect();
        assert_eq!(values, (0..2 * jobs).map(|i| i as f64).collect::<Vec<_>>());
        // one after the other would take twice as long; the last job alone is waited for
        assert!(start.elapsed() < produced + each * 5, "{:?} after {produced:?}", start.elapsed());
    }
}
