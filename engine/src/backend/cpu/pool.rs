//! A pool of threads for work of microseconds: fork, join, and nothing allocated.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Polls before a waiting thread goes to sleep (workers) or yields (the caller): some tens of microseconds, longer
/// than the pauses inside a step and shorter than a scheduler's slice.
///
/// Under Miri, where a poll takes as long as a step of another thread, hardly any.
const SPINS: u32 = if cfg!(miri) { 4 } else { 8_192 };

/// A job: called with a thread and a range of items.
type Job = *const (dyn Fn(usize, Range<usize>) + Sync);

struct Task {
    job: Job,
    count: usize,
    grain: usize,
}

struct Shared {
    /// The number of the current task (upper half), whether it can be joined, and how many workers are in it.
    state: AtomicU64,
    /// Chunks of the current task that have been handed out.
    chunk: AtomicUsize,
    stop: AtomicBool,
    task: UnsafeCell<Option<Task>>,
    asleep: Mutex<usize>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

const OPEN: u64 = 1 << 31;
const WORKERS: u64 = OPEN - 1;
const NEXT: u64 = 1 << 32;

// SAFETY: `task` is written only by the owner of the pool while no worker is in a task and none can join, and read by
// workers only after they joined, which the release of `state` after that write allows.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `task` is used only while `Pool::for_each` keeps what it points to alive.
unsafe impl Send for Shared {}

/// A fixed number of threads, the caller's included.
///
/// A worker joins a task only while there is something left of it: one that the system does not run just now is not
/// waited for.
///
/// After a job panicked, what it was to write is half written: the pool then refuses further work.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    is_poisoned: bool,
}

impl Pool {
    /// A pool of `threads` threads; 1 starts none.
    ///
    /// # Errors
    /// What the system says when it cannot start a thread.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            chunk: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            task: UnsafeCell::new(None),
            asleep: Mutex::new(0),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::new(), is_poisoned: false };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("kiln-{index}"));
            pool.workers.push(builder.spawn(move || work(&shared, index))?);
        }
        Ok(pool)
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Whether a job panicked.
    pub fn is_poisoned(&self) -> bool {
        self.is_poisoned
    }

    /// Calls `job(thread, range)` for ranges that together are `0..count`, each of `grain` items but for the last, and
    /// returns when all are done.
    ///
    /// # Panics
    /// If a job panics, or if one did before.
    pub fn for_each(&mut self, count: usize, grain: usize, job: impl Fn(usize, Range<usize>) + Sync) {
        assert!(!self.is_poisoned, "a job of this pool panicked before: what it wrote is not whole");
        // Until the end is reached: whatever leaves this function otherwise is a panic.
        self.is_poisoned = true;
        self.run(count, grain.max(1), job);
        self.is_poisoned = false;
    }

    fn run(&mut self, count: usize, grain: usize, job: impl Fn(usize, Range<usize>) + Sync) {
        if self.workers.is_empty() || count <= grain {
            if count > 0 {
                job(0, 0..count);
            }
            return;
        }
        let shared = &*self.shared;
        let job: &(dyn Fn(usize, Range<usize>) + Sync) = &job;
        // SAFETY: only the lifetime changes; this function does not return before every worker has left the task.
        let erased = unsafe { std::mem::transmute::<&(dyn Fn(usize, Range<usize>) + Sync), Job>(job) };
        // SAFETY: the last task is closed and left, see `Shared`; `&mut self` keeps other callers out.
        unsafe { *shared.task.get() = Some(Task { job: erased, count, grain }) };
        shared.chunk.store(0, Ordering::Relaxed);
        let number = shared.state.load(Ordering::Relaxed) & !(NEXT - 1);
        shared.state.store(number.wrapping_add(NEXT) | OPEN, Ordering::SeqCst);
        // The lock orders this with a worker that is about to sleep: it either sees the new state or is woken.
        if *lock(&shared.asleep) > 0 {
            shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| chunks(shared, job, count, grain, 0)));
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while shared.state.load(Ordering::Acquire) & WORKERS > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        if let Some(panic) = lock(&shared.panic).take() {
            resume_unwind(panic);
        }
    }
}

fn chunks(
    shared: &Shared,
    job: &(dyn Fn(usize, Range<usize>) + Sync),
    count: usize,
    grain: usize,
    thread: usize,
) {
    loop {
        let start = shared.chunk.fetch_add(1, Ordering::Relaxed).saturating_mul(grain);
        if start >= count {
            return;
        }
        job(thread, start..count.min(start + grain));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.state.fetch_add(NEXT, Ordering::SeqCst);
        drop(lock(&self.shared.asleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches panics of its jobs, so there is nothing to learn here.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let state = wait(shared, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        seen = state >> 32;
        if !join(shared, seen) {
            continue;
        }
        // SAFETY: this worker is in the task, see `Shared`.
        if let Some(task) = unsafe { &*shared.task.get() } {
            // SAFETY: `Pool::for_each` keeps the job alive until this worker has left.
            let job = unsafe { &*task.job };
            let result =
                catch_unwind(AssertUnwindSafe(|| chunks(shared, job, task.count, task.grain, index)));
            if let Err(panic) = result {
                *lock(&shared.panic) = Some(panic);
            }
        }
        shared.state.fetch_sub(1, Ordering::Release);
    }
}

/// Joins task `number` if it is still open.
fn join(shared: &Shared, number: u64) -> bool {
    let mut state = shared.state.load(Ordering::Relaxed);
    while state >> 32 == number && state & OPEN != 0 {
        match shared.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(current) => state = current,
        }
    }
    false
}

/// Returns the state when its task is no longer `seen`.
fn wait(shared: &Shared, seen: u64) -> u64 {
    for _ in 0..SPINS {
        let state = shared.state.load(Ordering::Acquire);
        if state >> 32 != seen {
            return state;
        }
        std::hint::spin_loop();
    }
    let mut asleep = lock(&shared.asleep);
    *asleep += 1;
    let state = loop {
        let state = shared.state.load(Ordering::SeqCst);
        if state >> 32 != seen {
            break state;
        }
        asleep = shared.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
    };
    *asleep -= 1;
    state
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A slice that several threads write, each its own part.
#[derive(Clone, Copy)]
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    life: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it is a mutable borrow that threads share; `part` hands the duty of disjointness to its caller.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows a slice for parts.
    pub fn new(slice: &'a mut [T]) -> Disjoint<'a, T> {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), life: std::marker::PhantomData }
    }

    /// A part.
    ///
    /// # Safety
    /// No other part that overlaps `range` may be alive.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part of the slice");
        // SAFETY: inside the slice by the check above, unaliased by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_whatever_the_threads() {
        for threads in [1, 2, 5] {
            let Ok(mut pool) = Pool::new(threads) else { panic!("threads start") };
            for count in [0, 1, 7, 100] {
                for grain in [1, 3, 1000] {
                    let mut items = vec![0u32; count];
                    let parts = Disjoint::new(&mut items);
                    pool.for_each(count, grain, |_, range| {
                        // SAFETY: ranges do not overlap.
                        unsafe { parts.part(range) }.iter_mut().for_each(|item| *item += 1);
                    });
                    assert_eq!(items, vec![1; count]);
                }
            }
        }
    }

    #[test]
    fn a_panic_in_a_job_reaches_the_caller_and_the_pool_is_not_used_again() {
        for threads in [1, 3] {
            let Ok(mut pool) = Pool::new(threads) else { panic!("threads start") };
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(100, 1, |_, range| assert!(!range.contains(&50), "seeded"));
            }));
            assert!(caught.is_err() && pool.is_poisoned());
            let count = AtomicUsize::new(0);
            let again = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(100, 1, |_, range| {
                    count.fetch_add(range.len(), Ordering::Relaxed);
                });
            }));
            let message = again.expect_err("refused");
            assert!(message.downcast_ref::<&str>().is_some_and(|text| text.contains("panicked before")));
            assert_eq!(count.into_inner(), 0);
        }
    }

    #[test]
    fn many_short_tasks_in_a_row_are_each_complete() {
        let Ok(mut pool) = Pool::new(4) else { panic!("threads start") };
        for round in 0..if cfg!(miri) { 20 } else { 20_000usize } {
            let sum = AtomicUsize::new(0);
            pool.for_each(5, 1, |_, range| {
                sum.fetch_add(range.start + round, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 10 + 5 * round);
        }
    }
}
