//! Several requests at once, without holding up the engine's threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `work` of every item, in order, by up to `concurrency` threads of their own: they wait for others rather than compute.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], concurrency: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let workers = concurrency.clamp(1, items.len().max(1));
    if workers == 1 {
        return items.iter().map(work).collect();
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(items.len())));
    let worker = || {
        while let Some((index, item)) = take(items, &next) {
            let result = work(item);
            done.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, result));
        }
    };
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(worker))));
    let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

fn take<'a, T>(items: &'a [T], next: &AtomicUsize) -> Option<(usize, &'a T)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    items.get(index).map(|item| (index, item))
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_are_in_order_whatever_finishes_first() {
        let items: Vec<u64> = (0..20).collect();
        let work = |&i: &u64| {
            std::thread::sleep(std::time::Duration::from_millis(20 - i));
            i * i
        };
        assert_eq!(super::map(&items, 7, work), items.iter().map(|i| i * i).collect::<Vec<_>>());
        assert!(super::map(&[] as &[u64], 4, work).is_empty());
    }
}
