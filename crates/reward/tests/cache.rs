//! The cache: keys, several users at once, spoiled files.

mod common;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::clips;
use reward::{Cached, Reward, RewardBreakdown, RewardError, Sample, Scored};

/// Brightness times a factor; counts the samples it is asked for, and cannot score blue ones.
struct Counting<'a> {
    asked: &'a AtomicUsize,
    identity: Option<&'static str>,
}

impl Reward for Counting<'_> {
    fn name(&self) -> &str {
        "counting"
    }

    fn identity(&self) -> Option<String> {
        self.identity.map(str::to_owned)
    }

    fn score(&self, batch: &[Sample<'_>]) -> Vec<Scored> {
        self.asked.fetch_add(batch.len(), Ordering::Relaxed);
        let one = |sample: &Sample<'_>| {
            if sample.prompt.contains("blue") {
                return Err(RewardError::new("counting", sample.prompt, "no blue"));
            }
            Ok(RewardBreakdown { value: common::mean_byte(sample.frames) / 3.0, components: [("one".to_owned(), 1.0 / 3.0)].into() })
        };
        batch.iter().map(one).collect()
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("folder").filter_map(Result::ok) {
        if entry.path().is_dir() { files.extend(self::files(&entry.path())) } else { files.push(entry.path()) }
    }
    files
}

fn asked(folder: &Path, identity: Option<&'static str>, change: impl Fn(&mut Sample<'_>)) -> (usize, Vec<Scored>) {
    let (count, clips) = (AtomicUsize::new(0), clips(60));
    let mut batch: Vec<Sample<'_>> = clips.iter().map(|(prompt, frames)| Sample::new(prompt, frames)).collect();
    batch.iter_mut().for_each(change);
    let scores = Cached::new(Counting { asked: &count, identity }, folder).score(&batch);
    (count.into_inner(), scores)
}

#[test]
fn values_are_computed_once_and_come_back_bit_for_bit() {
    let folder = tempfile::tempdir().expect("folder");
    let blue = clips(60).iter().filter(|(prompt, _)| prompt.contains("blue")).count();
    let (first, fresh) = asked(folder.path(), Some("1"), |_| {});
    let (second, kept) = asked(folder.path(), Some("1"), |_| {});
    assert_eq!((first, second), (60, blue), "errors are not kept");
    assert_eq!(fresh, kept);
    assert!(blue > 0 && files(folder.path()).len() == 60 - blue);
    assert_eq!(asked(folder.path(), Some("2"), |_| {}).0, 60, "another version");
    assert_eq!(asked(folder.path(), Some("1"), |sample| sample.fps = 8.0).0, 60);
    assert_eq!(asked(folder.path(), Some("1"), |sample| sample.prompt = "x").0, 60);
    let before = files(folder.path()).len();
    assert_eq!(asked(folder.path(), None, |_| {}).0, 60, "unknown identity");
    assert_eq!(files(folder.path()).len(), before);
}

#[test]
fn spoiled_files_are_computed_again() {
    let folder = tempfile::tempdir().expect("folder");
    let (_, fresh) = asked(folder.path(), Some("1"), |_| {});
    for (i, file) in files(folder.path()).iter().enumerate() {
        let whole = std::fs::read(file).expect("read");
        let spoiled =
            [&whole[..whole.len() / 2], b"", b"{\"value\": null, \"components\": {}}", b"{\"value\": 1e999, \"components\": {}}"][i % 4];
        std::fs::write(file, spoiled).expect("write");
    }
    assert_eq!(asked(folder.path(), Some("1"), |_| {}), (60, fresh.clone()));
    let blue = fresh.iter().filter(|score| score.is_err()).count();
    assert_eq!(asked(folder.path(), Some("1"), |_| {}).0, blue, "and kept whole");
}

#[test]
fn several_users_at_once_agree() {
    let folder = tempfile::tempdir().expect("folder");
    let results: Vec<Vec<Scored>> = std::thread::scope(|scope| {
        let users: Vec<_> = (0..4).map(|_| scope.spawn(|| asked(folder.path(), Some("1"), |_| {}).1)).collect();
        users.into_iter().map(|user| user.join().expect("no panic")).collect()
    });
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    assert!(files(folder.path()).iter().all(|file| file.extension().is_some_and(|end| end == "json")), "nothing is left half written");
}

#[test]
fn a_folder_that_cannot_be_written_costs_time_only() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("write");
    let (count, scores) = asked(&file, Some("1"), |_| {});
    assert_eq!(count, 60);
    assert!(scores[0].is_ok());
}
