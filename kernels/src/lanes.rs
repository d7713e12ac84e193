//! How a walk is split over the lanes of a warp, without saying whether those are threads or a loop.

use crate::{Arith, canonical};

/// Lanes of a warp. Part of every walk's definition: another number would give other bits.
pub const LANES: usize = 32;

/// A warp's worth of partial results, and the two things a walk does with them.
///
/// On a device an implementor stands for the calling thread, which is one lane; on the host for all of them.
pub trait Lanes: Copy {
    /// The arithmetic that the lanes do.
    type Arith: Arith;
    /// One f32 for each lane that this home runs: `f32` on a device, `[f32; LANES]` on the host.
    type Partials: Copy;

    /// The arithmetic.
    fn arith(self) -> Self::Arith;

    /// Partials that are all `value`.
    fn splat(self, value: f32) -> Self::Partials;

    /// Replaces each lane's partial `p` by `step(lane, p)`.
    fn update(self, partials: &mut Self::Partials, step: impl FnMut(usize, f32) -> f32);

    /// Calls `step(lane)` for each lane that this home runs.
    fn for_each(self, step: impl FnMut(usize));

    /// The sum of all lanes' partials, the same in every lane.
    ///
    /// Five rounds with distance d = 16, 8, 4, 2, 1: each lane `l` becomes `add(p[l], p[l ^ d])`. Addition commutes,
    /// so both lanes of a pair hold the same bits after each round, and all lanes hold the same sum at the end.
    fn sum(self, partials: Self::Partials) -> f32;
}

/// Partials that start as `start`; then lane `l` does `p = step(i, p)` for each i = l, l + 32, l + 64, ... below `count`.
///
/// Written with the items outside and the lanes inside, so that a host reads memory in order and has 32 independent
/// chains to vectorise.
#[inline(always)]
pub fn strided<L: Lanes>(
    lanes: L,
    count: usize,
    start: f32,
    mut step: impl FnMut(usize, f32) -> f32,
) -> L::Partials {
    let mut partials = lanes.splat(start);
    let whole = count - count % LANES;
    let mut base = 0;
    while base < whole {
        lanes.update(&mut partials, |lane, p| step(base + lane, p));
        base += LANES;
    }
    if whole < count {
        lanes.update(&mut partials, |lane, p| if whole + lane < count { step(whole + lane, p) } else { p });
    }
    partials
}

/// Calls `step(i)` for each i below `count`, item `i` in lane `i % LANES`.
#[inline(always)]
pub fn strided_for_each<L: Lanes>(lanes: L, count: usize, mut step: impl FnMut(usize)) {
    let mut base = 0;
    while base < count {
        lanes.for_each(|lane| {
            if base + lane < count {
                step(base + lane);
            }
        });
        base += LANES;
    }
}

/// [`Lanes::sum`] with every NaN made [`crate::NAN`].
#[inline(always)]
pub(crate) fn sum_canonical<L: Lanes>(lanes: L, partials: L::Partials) -> f32 {
    canonical(lanes.sum(partials))
}
