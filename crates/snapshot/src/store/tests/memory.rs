//! An in-memory bucket with fault injection.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use sterling_core::error::{Error, Result};
use sterling_storage::objects::{Objects, Tag, WriteCondition};

type Kept = BTreeMap<String, (Vec<u8>, Tag)>;

/// Fault of one read of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection breaks after this number of bytes.
    Cut(u64),
    /// A bit flips in the byte at this offset.
    Flip(u64),
}

/// Fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFault {
    /// The request is lost.
    Before,
    /// The answer is lost.
    After,
    /// A read finds nothing; a listing lacks its last object.
    Missing,
    /// A conditional write fails as if the object existed.
    Conflict,
    /// A byte of the answer is corrupted.
    Flip,
}

#[derive(Debug, Default)]
pub struct Memory {
    pub kept: Mutex<Kept>,
    /// Listing to return in place of the actual one.
    pub listed: Mutex<Option<Kept>>,
    pub is_down: AtomicBool,
    pub is_read_only: AtomicBool,
    pub ignores_conditions: AtomicBool,
    /// The next conditional write succeeds, but its answer is lost.
    pub loses_answer: AtomicBool,
    /// Number of writes until the bucket is down.
    pub writes_left: AtomicUsize,
    pub faults: Mutex<Vec<(String, Fault)>>,
    pub clock_ms: AtomicU64,
    pub bytes_read: AtomicU64,
    writes: AtomicU64,
    calls: AtomicUsize,
    /// Number of the call with a fault, and the fault.
    plan: Mutex<Option<(usize, CallFault)>>,
}

impl Memory {
    pub fn new() -> Arc<Self> {
        let memory = Memory::default();
        memory.writes_left.store(usize::MAX, SeqCst);
        memory.clock_ms.store(1_000_000_000, SeqCst);
        Arc::new(memory)
    }

    /// Injects a fault into a later call; the next call is 0.
    pub fn fail_at(&self, call: usize, fault: CallFault) {
        *self.plan.lock().unwrap() = Some((self.calls.load(SeqCst) + call, fault));
    }

    /// Removes the fault; returns whether it occurred.
    pub fn no_fault(&self) -> bool {
        let plan = self.plan.lock().unwrap().take();
        plan.is_some_and(|(at, _)| at < self.calls.load(SeqCst))
    }

    /// Returns the fault of the current call.
    fn met(&self) -> Result<Option<CallFault>> {
        let call = self.calls.fetch_add(1, SeqCst);
        let fault = self.plan.lock().unwrap().filter(|(at, _)| *at == call).map(|(_, fault)| fault);
        if fault == Some(CallFault::Before) {
            Err(Error::unavailable("the call did not come through"))
        } else {
            Ok(fault)
        }
    }

    /// Ends a call with its fault.
    fn lost<T>(&self, fault: Option<CallFault>, done: T) -> Result<T> {
        if fault == Some(CallFault::After) { Err(Error::unavailable("the answer was lost")) } else { Ok(done) }
    }

    pub fn keys(&self) -> Vec<String> {
        self.kept.lock().unwrap().keys().cloned().collect()
    }

    /// Changes the bytes of an object without changing its tag.
    pub fn change(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut kept = self.kept.lock().unwrap();
        let (bytes, tag) = kept.get_mut(key).unwrap();
        change(bytes);
        tag.bytes = bytes.len() as u64;
    }

    fn up(&self) -> Result<()> {
        match self.is_down.load(SeqCst) {
            true => Err(Error::unavailable("the bucket is down")),
            false => Ok(()),
        }
    }

    fn found(&self, key: &str) -> Result<(Vec<u8>, Tag)> {
        self.up()?;
        let kept = self.kept.lock().unwrap();
        kept.get(key).cloned().ok_or_else(|| Error::not_found(format!("{key}: no such object")))
    }

    fn may_write(&self) -> Result<()> {
        self.up()?;
        if self.is_read_only.load(SeqCst) {
            return Err(Error::new(sterling_core::error::Kind::Io, "denied"));
        }
        if self.writes_left.fetch_sub(1, SeqCst) == 0 {
            self.is_down.store(true, SeqCst);
        }
        self.up()
    }
}

impl Objects for Memory {
    fn list(&self, under: &str) -> Result<Vec<(String, Tag)>> {
        self.up()?;
        let fault = self.met()?;
        let (kept, listed) = (self.kept.lock().unwrap(), self.listed.lock().unwrap());
        let shown = listed.as_ref().unwrap_or(&kept);
        let within = shown.iter().filter(|(key, _)| under.is_empty() || key.starts_with(&format!("{under}/")));
        let mut within: Vec<_> = within.map(|(key, (_, tag))| (key.clone(), tag.clone())).collect();
        match fault {
            Some(CallFault::Missing) => drop(within.pop()),
            Some(CallFault::Flip) => within.last_mut().into_iter().for_each(|(_, tag)| tag.bytes ^= 1),
            _ => {}
        }
        self.lost(fault, within)
    }

    fn head(&self, key: &str) -> Result<Tag> {
        let fault = self.met()?;
        let key = if fault == Some(CallFault::Missing) { "" } else { key };
        self.found(key).and_then(|(_, tag)| self.lost(fault, tag))
    }

    fn get(&self, key: &str) -> Result<(Vec<u8>, Tag)> {
        let fault = self.met()?;
        let key = if fault == Some(CallFault::Missing) { "" } else { key };
        let (mut bytes, tag) = self.found(key)?;
        if fault == Some(CallFault::Flip) {
            bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
        self.lost(fault, (bytes, tag))
    }

    fn read(&self, key: &str, of: &Tag, range: Range<u64>, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let met = self.met()?;
        let (mut bytes, tag) = self.found(if met == Some(CallFault::Missing) { "" } else { key })?;
        if met == Some(CallFault::Flip) {
            bytes[range.start as usize] ^= 1;
        }
        if tag.e_tag != of.e_tag {
            return Err(Error::conflict("another object"));
        }
        let fault = {
            let mut faults = self.faults.lock().unwrap();
            faults.iter().position(|(of, _)| of == key).map(|n| faults.remove(n).1)
        };
        if let Some(Fault::Flip(at)) = fault {
            bytes[at as usize] ^= 1;
        }
        let end = if let Some(Fault::Cut(at)) = fault { at.clamp(range.start, range.end) } else { range.end };
        for piece in bytes[range.start as usize..end as usize].chunks(1000) {
            self.bytes_read.fetch_add(piece.len() as u64, SeqCst);
            take(piece)?;
        }
        match end < range.end || met == Some(CallFault::After) {
            true => Err(Error::unavailable("the connection broke")),
            false => Ok(()),
        }
    }

    fn put(&self, key: &str, bytes: Vec<u8>, over: &WriteCondition) -> Result<Tag> {
        self.may_write()?;
        let fault = self.met()?;
        if fault == Some(CallFault::Conflict) && *over != WriteCondition::Anything {
            return Err(Error::conflict(format!("{key}: another object exists there")));
        }
        let mut kept = self.kept.lock().unwrap();
        let stands = kept.get(key).map(|(_, tag)| tag.e_tag.clone());
        let may = match over {
            WriteCondition::Anything => true,
            WriteCondition::Nothing => stands.is_none(),
            WriteCondition::This(tag) => stands == Some(tag.e_tag.clone()),
        };
        if !may && !self.ignores_conditions.load(SeqCst) {
            return Err(Error::conflict(format!("{key}: another object exists there")));
        }
        let tag = Tag {
            e_tag: Some(format!("e{}", self.writes.fetch_add(1, SeqCst))),
            generation: None,
            bytes: bytes.len() as u64,
            modified_ms: self.clock_ms.load(SeqCst) as i64,
        };
        kept.insert(key.into(), (bytes, tag.clone()));
        if *over != WriteCondition::Anything && self.loses_answer.swap(false, SeqCst) {
            // Error that a retry of the request receives.
            return Err(Error::conflict(format!("{key}: another object exists there")));
        }
        self.lost(fault, tag)
    }

    fn upload(&self, key: &str, file: &Path) -> Result<()> {
        self.put(key, std::fs::read(file).unwrap(), &WriteCondition::Anything).map(drop)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.may_write()?;
        let fault = self.met()?;
        self.kept.lock().unwrap().remove(key);
        self.lost(fault, ())
    }
}
