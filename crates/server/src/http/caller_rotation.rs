//! Queue that rotates between callers: the oldest job of each caller in rotation, so that no caller waits behind all jobs of
//! another.

use std::collections::{HashMap, VecDeque};

use sterling_core::quota::Flow;

/// Maximum number of callers that are examined per rotation.
const CALLERS_EXAMINED_MAX: usize = 64;

/// Waiting jobs, by caller.
#[derive(Debug)]
pub(super) struct WaitingJobs<J> {
    waiting: HashMap<Flow, VecDeque<J>>,
    /// Callers with waiting jobs, in the order of rotation.
    order: VecDeque<Flow>,
}

impl<J> Default for WaitingJobs<J> {
    fn default() -> Self {
        WaitingJobs { waiting: HashMap::new(), order: VecDeque::new() }
    }
}

impl<J> WaitingJobs<J> {
    pub(super) fn push(&mut self, flow: Flow, job: J) {
        let jobs = self.waiting.entry(flow).or_default();
        if jobs.is_empty() {
            self.order.push_back(flow);
        }
        jobs.push_back(job);
    }

    /// Removes and returns the oldest job of the next caller.
    pub(super) fn pop(&mut self) -> Option<J> {
        self.pop_where(|_| true)
    }

    /// Removes and returns the oldest job of the next caller that `may` accepts. Examines a few callers only; skipped callers
    /// move to the end.
    pub(super) fn pop_where(&mut self, may: impl Fn(Flow) -> bool) -> Option<J> {
        let looked_at = self.order.len().min(CALLERS_EXAMINED_MAX);
        let at = self.order.iter().take(looked_at).position(|&flow| may(flow));
        self.order.rotate_left(at.unwrap_or(looked_at));
        at?;
        let flow = self.order.pop_front()?;
        let jobs = self.waiting.get_mut(&flow)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.waiting.remove(&flow);
        } else {
            self.order.push_back(flow);
        }
        job
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Returns the number of waiting jobs.
    pub(super) fn len(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_rotate_between_callers() {
        let mut turns = WaitingJobs::default();
        for job in 0..4 {
            turns.push(Flow(1), job);
        }
        turns.push(Flow(2), 10);
        assert_eq!(turns.len(), 5);
        assert_eq!([turns.pop(), turns.pop(), turns.pop()], [Some(0), Some(10), Some(1)]);
        turns.push(Flow(2), 11);
        assert_eq!([turns.pop(), turns.pop(), turns.pop(), turns.pop()], [Some(2), Some(11), Some(3), None]);
        assert!(turns.waiting.is_empty() && turns.is_empty(), "callers that left take no memory");
        for (caller, job) in [(1, 0), (2, 10), (1, 1), (3, 20)] {
            turns.push(Flow(caller), job);
        }
        let others = |flow| flow != Flow(1);
        assert_eq!(
            [turns.pop_where(others), turns.pop_where(others), turns.pop_where(others)],
            [Some(10), Some(20), None]
        );
        assert_eq!([turns.pop(), turns.pop(), turns.pop()], [Some(0), Some(1), None]);
        // An accepted caller is found behind any number of rejected ones, after a few calls.
        for caller in 0..3 * CALLERS_EXAMINED_MAX {
            turns.push(Flow(caller as u64), caller as i32);
        }
        let last = |flow| flow == Flow(3 * CALLERS_EXAMINED_MAX as u64 - 1);
        let found = [turns.pop_where(last), turns.pop_where(last), turns.pop_where(last), turns.pop_where(last)];
        assert_eq!(found, [None, None, Some(3 * CALLERS_EXAMINED_MAX as i32 - 1), None]);
        assert_eq!(turns.len(), 3 * CALLERS_EXAMINED_MAX - 1);
    }
}
