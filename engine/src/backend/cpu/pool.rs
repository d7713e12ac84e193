//! A pool of threads for work of microseconds: fork, join, and nothing allocated.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Polls before a waiting thread goes to sleep (workers) or yields (the caller): some tens of microseconds, longer
/// than the pauses inside a step and shorter than a scheduler's slice.
const SPINS: u32 = 8_192;

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts jobs; a worker runs one for each step of it.
    epoch: AtomicUsize,
    /// Workers that have finished the current job.
    done: AtomicUsize,
    /// Chunks of the current job that have been handed out.
    chunk: AtomicUsize,
    stop: AtomicBool,
    job: UnsafeCell<Option<Job>>,
    asleep: Mutex<usize>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only by the owner of the pool while no worker runs (all are `done`), and read by workers
// only after they have seen the `epoch` that was released after that write.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only while `Pool::run` keeps what it points to alive.
unsafe impl Send for Shared {}

/// A fixed number of threads, the caller's included.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads; 1 starts none.
    ///
    /// # Errors
    /// What the system says when it cannot start a thread.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            chunk: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            asleep: Mutex::new(0),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::new() };
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

    /// Runs `job(thread)` once on every thread and returns when all have.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; this function does not return before every worker is done with it.
        let erased: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        // SAFETY: no worker runs now, see `Shared`; `&mut self` keeps other callers out.
        unsafe { *shared.job.get() = Some(erased) };
        shared.done.store(0, Ordering::Relaxed);
        // The lock orders this with a worker that is about to sleep: it either sees the new epoch or is woken.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if *lock(&shared.asleep) > 0 {
            shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        let mut spins = 0;
        while shared.done.load(Ordering::Acquire) < self.workers.len() {
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

    /// Calls `job(thread, range)` for ranges that together are `0..count`, each of `grain` items but for the last.
    pub fn for_each(&mut self, count: usize, grain: usize, job: impl Fn(usize, Range<usize>) + Sync) {
        let grain = grain.max(1);
        if self.workers.is_empty() || count <= grain {
            if count > 0 {
                job(0, 0..count);
            }
            return;
        }
        let shared = Arc::clone(&self.shared);
        shared.chunk.store(0, Ordering::Relaxed);
        self.run(&|thread| {
            loop {
                let start = shared.chunk.fetch_add(1, Ordering::Relaxed).saturating_mul(grain);
                if start >= count {
                    return;
                }
                job(thread, start..count.min(start + grain));
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
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
        wait(shared, seen);
        seen += 1;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: see `Shared`; the pointer is valid until this worker counts itself done.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: as above.
            let job = unsafe { &*job };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(index))) {
                *lock(&shared.panic) = Some(panic);
            }
        }
        shared.done.fetch_add(1, Ordering::Release);
    }
}

/// Returns when the epoch is no longer `seen`.
fn wait(shared: &Shared, seen: usize) {
    for _ in 0..SPINS {
        if shared.epoch.load(Ordering::Acquire) != seen {
            return;
        }
        std::hint::spin_loop();
    }
    let mut asleep = lock(&shared.asleep);
    *asleep += 1;
    while shared.epoch.load(Ordering::SeqCst) == seen {
        asleep = shared.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
    }
    *asleep -= 1;
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
    fn a_panic_in_a_job_reaches_the_caller_and_the_pool_lives_on() {
        let Ok(mut pool) = Pool::new(3) else { panic!("threads start") };
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|thread| assert!(thread != 2, "planted"));
        }));
        assert!(caught.is_err());
        let count = AtomicUsize::new(0);
        pool.run(&|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 3);
    }
}
