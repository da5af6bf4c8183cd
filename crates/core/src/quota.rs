//! Memory quota that several callers share, so that no single caller can occupy all of it.
//!
//! A caller may hold at most [`FREE_FACTOR`] times the free bytes (Choudhury and Hahne, "Dynamic Queue Length Thresholds for
//! Shared-Memory Packet Switches", 1998): a single caller gets nearly everything, and the next caller still finds room.
//! Callers are counted in a table of fixed size.
//!
//! ```
//! use sterling_core::quota::{Flow, Quota};
//!
//! let quota = Quota::new("bodies", 1_000);
//! let held = quota.hold(Flow::of_key("shop"), 900)?;
//! assert!(quota.hold(Flow::of_key("books"), 200).is_err());
//! drop(held);
//! assert_eq!(quota.held_bytes(), 0);
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

use std::fmt;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::error::{Error, Result};

/// Maximum ratio of one caller's bytes to the free bytes: 16 leaves a seventeenth of the total to others.
pub const FREE_FACTOR: u64 = 16;
/// Retry delay of a rejection.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// Number of entries of the table of callers. Callers that share an entry share its limit.
const CALLERS: usize = 1024;

/// Requests of one caller, as queues and quotas distinguish them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow(pub u64);

/// Random seed, so that clients cannot choose names or addresses that collide in the table.
static HASHES: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Flow {
    /// Returns the flow of an API key.
    pub fn of_key(name: &str) -> Self {
        Flow(HASHES.hash_one(("key", name)))
    }

    /// Returns the flow of an address. IPv6 addresses count by their /64 network, which one host usually owns.
    pub fn of_address(address: IpAddr) -> Self {
        let network = match address.to_canonical() {
            IpAddr::V4(address) => u64::from(u32::from(address)),
            IpAddr::V6(address) => (u128::from(address) >> 64) as u64,
        };
        Flow(HASHES.hash_one(("address", address.to_canonical().is_ipv4(), network)))
    }

    /// Returns the flow of a client of the router with this flow, from the number that the router gives it.
    pub fn of_client(self, number: u64) -> Self {
        Flow(HASHES.hash_one(("client", self.0, number)))
    }

    fn entry(self) -> usize {
        (self.0 % CALLERS as u64) as usize
    }
}

/// Maximum number of bytes that may be held at once.
pub struct Quota {
    /// Purpose of the memory, as rejections name it.
    name: &'static str,
    most: u64,
    held: AtomicU64,
    of_callers: Box<[AtomicU64]>,
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({} of {})", self.held_bytes(), self.most)
    }
}

impl Quota {
    /// Creates a quota of `most` bytes; rejections call it `name`.
    pub fn new(name: &'static str, most: u64) -> Arc<Self> {
        let of_callers = (0..CALLERS).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Quota { name, most, held: AtomicU64::new(0), of_callers })
    }

    /// Returns the maximum number of bytes.
    pub fn most_bytes(&self) -> u64 {
        self.most
    }

    /// Returns the bytes held now.
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Reserves bytes for a caller until the returned value is dropped.
    ///
    /// # Errors
    /// `TooCostly` if `bytes` exceed the quota; `Overloaded` if this caller or others hold too much of the quota now.
    pub fn hold(self: &Arc<Self>, flow: Flow, bytes: u64) -> Result<Memory> {
        self.hold_within(flow, bytes, self.most)
    }

    /// Same as [`Quota::hold`], with the limit `most` on all held bytes.
    ///
    /// # Errors
    /// As [`Quota::hold`].
    pub fn hold_within(self: &Arc<Self>, flow: Flow, bytes: u64, most: u64) -> Result<Memory> {
        let memory = Memory { quota: self.clone(), flow, bytes: AtomicU64::new(0) };
        memory.add_within(bytes, most)?;
        Ok(memory)
    }

    /// Reserves bytes for a value that already has `own` bytes. These `own` bytes do not count towards the caller's
    /// limit. So the only value of a caller may grow until the quota is full, as if its final size had been reserved at
    /// once.
    fn take(&self, flow: Flow, own: u64, bytes: u64, most: u64) -> std::result::Result<(), Denied> {
        let of_caller = &self.of_callers[flow.entry()];
        let mine = of_caller.load(Ordering::Relaxed).saturating_sub(own);
        let denied = |held: u64| match most.checked_sub(held) {
            Some(free) if bytes <= free => {
                let grown = mine.saturating_add(own).saturating_add(bytes);
                (mine > 0 && grown > free.saturating_mul(FREE_FACTOR)).then_some(Denied::Mine(mine))
            }
            _ => Some(Denied::Others(held.saturating_sub(own))),
        };
        let add = |held: u64| denied(held).is_none().then(|| held + bytes);
        match self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => {
                of_caller.fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            }
            Err(held) => Err(denied(held).unwrap_or(Denied::Others(held.saturating_sub(own)))),
        }
    }
}

/// Reason of a rejection: who holds too many bytes, and how many. The bytes of the growing value do not count.
enum Denied {
    Others(u64),
    Mine(u64),
}

/// Reserved bytes of a quota, returned on drop.
#[derive(Debug)]
pub struct Memory {
    quota: Arc<Quota>,
    flow: Flow,
    bytes: AtomicU64,
}

impl Memory {
    /// Reserves more bytes.
    ///
    /// # Errors
    /// As [`Quota::hold`] for all bytes of this value together.
    pub fn add(&self, bytes: u64) -> Result<()> {
        self.add_within(bytes, self.quota.most)
    }

    fn add_within(&self, bytes: u64, most: u64) -> Result<()> {
        let name = self.quota.name;
        let own = self.bytes();
        let all = own.saturating_add(bytes);
        if all > self.quota.most {
            let most = self.quota.most;
            return Err(Error::too_costly(format!(
                "the {name} takes {all} bytes of memory or more, expected at most {most} for all requests together"
            )));
        }
        self.quota.take(self.flow, own, bytes, most).map_err(|denied| {
            let who = match denied {
                Denied::Others(held) => format!("others hold {held}"),
                Denied::Mine(held) => format!("other requests of the same caller hold {held}"),
            };
            Error::overloaded(format!("the {name} takes {all} bytes of memory, {who} of {most}, try again later"))
                .retry_after(RETRY_AFTER)
        })?;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let bytes = *self.bytes.get_mut();
        // Subtracts from the caller first: a concurrent reader may see too little free memory, but never too much.
        self.quota.of_callers[self.flow.entry()].fetch_sub(bytes, Ordering::Relaxed);
        self.quota.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::error::Kind;

    #[test]
    fn one_caller_leaves_room_to_the_next() {
        let quota = Quota::new("answer", 1700);
        let mut held: Vec<Memory> = Vec::new();
        while let Ok(memory) = quota.hold(Flow(1), 10) {
            held.push(memory);
        }
        assert_eq!(quota.held_bytes(), 1600, "16 of 17 parts");
        let error = quota.hold(Flow(1), 10).unwrap_err();
        assert_eq!(error.kind(), Kind::Overloaded);
        assert!(error.to_string().contains("of the same caller hold 1600 of 1700"), "{error}");
        let other = quota.hold(Flow(2), 90).unwrap();
        assert!(quota.hold(Flow(3), 11).unwrap_err().to_string().contains("others hold 1690 of 1700"));
        drop((held, other));
        assert_eq!(quota.held_bytes(), 0);
        let complete = quota.hold(Flow(1), 1700).unwrap();
        let error = complete.add(1).unwrap_err();
        assert_eq!(error.kind(), Kind::TooCostly);
        assert!(error.to_string().contains("1701 bytes") && error.to_string().contains("at most 1700"), "{error}");
    }

    #[test]
    fn a_lone_value_grows_as_far_as_one_reserved_at_once() {
        let quota = Quota::new("answer", 1700);
        let answer = quota.hold(Flow(1), 0).unwrap();
        for bytes in 1..=170 {
            answer.add(10).unwrap();
            assert_eq!(answer.bytes(), 10 * bytes);
        }
        let error = answer.add(10).unwrap_err();
        assert_eq!(error.kind(), Kind::TooCostly);
        assert!(error.to_string().contains("1710 bytes") && error.to_string().contains("at most 1700"), "{error}");
        drop(answer);
        // If the caller or another caller holds other memory, growth stops earlier, and the message names the holder
        // and the bytes.
        let (answer, other) = (quota.hold(Flow(1), 1580).unwrap(), quota.hold(Flow(1), 20).unwrap());
        let error = answer.add(30).unwrap_err().to_string();
        assert!(error.contains("other requests of the same caller hold 20 of 1700"), "{error}");
        drop(other);
        let other = quota.hold(Flow(2), 20).unwrap();
        let error = answer.add(101).unwrap_err().to_string();
        assert!(error.contains("others hold 20 of 1700"), "{error}");
        answer.add(100).unwrap();
        drop((answer, other));
        assert_eq!(quota.held_bytes(), 0);
    }

    #[test]
    fn callers_are_distinguished_by_key_or_network() {
        let of = |text: &str| Flow::of_address(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"), "one host");
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert_ne!(Flow::of_key("a"), Flow::of_key("b"));
    }

    proptest! {
        #[test]
        fn reserved_bytes_are_the_sum_of_live_reservations(steps in proptest::collection::vec((0u64..5, 0u64..400, any::<bool>()), 0..80)) {
            let quota = Quota::new("answer", 1000);
            let mut held: Vec<(u64, Memory)> = Vec::new();
            for (flow, bytes, drops) in steps {
                let of = |held: &[(u64, Memory)], flow| held.iter().filter(|(of, _)| *of == flow).map(|(_, m)| m.bytes()).sum::<u64>();
                if drops && !held.is_empty() {
                    held.swap_remove((bytes as usize) % held.len());
                } else {
                    let (mine, free) = (of(&held, flow), 1000 - held.iter().map(|(_, m)| m.bytes()).sum::<u64>());
                    let fits = bytes <= free && (mine == 0 || mine + bytes <= FREE_FACTOR * free);
                    let taken = quota.hold(Flow(flow), bytes);
                    prop_assert_eq!(taken.is_ok(), fits);
                    held.extend(taken.ok().map(|memory| (flow, memory)));
                }
                prop_assert_eq!(quota.held_bytes(), held.iter().map(|(_, m)| m.bytes()).sum::<u64>());
            }
        }
    }
}
