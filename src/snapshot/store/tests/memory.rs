//! A bucket in memory that can be told to fail.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::objects::{Objects, Over, Tag};

type Kept = BTreeMap<String, (Vec<u8>, Tag)>;

/// What a read of an object ends with, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection breaks after so many bytes.
    Cut(u64),
    /// A bit is another one at this place.
    Flip(u64),
}

#[derive(Debug, Default)]
pub struct Memory {
    pub kept: Mutex<Kept>,
    /// What lists show where it is not what there is.
    pub listed: Mutex<Option<Kept>>,
    pub is_down: AtomicBool,
    pub is_read_only: AtomicBool,
    pub ignores_conditions: AtomicBool,
    /// The answer to the next write under a condition is lost, though it was done.
    pub loses_answer: AtomicBool,
    /// Writes until the bucket is down.
    pub writes_left: AtomicUsize,
    pub faults: Mutex<Vec<(String, Fault)>>,
    pub clock_ms: AtomicU64,
    pub bytes_read: AtomicU64,
    writes: AtomicU64,
}

impl Memory {
    pub fn new() -> Arc<Self> {
        let memory = Memory::default();
        memory.writes_left.store(usize::MAX, SeqCst);
        memory.clock_ms.store(1_000_000_000, SeqCst);
        Arc::new(memory)
    }

    pub fn keys(&self) -> Vec<String> {
        self.kept.lock().unwrap().keys().cloned().collect()
    }

    /// Changes the bytes of an object unseen: its tag stays.
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
            return Err(Error::new(crate::error::Kind::Io, "denied"));
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
        let (kept, listed) = (self.kept.lock().unwrap(), self.listed.lock().unwrap());
        let shown = listed.as_ref().unwrap_or(&kept);
        let within = shown.iter().filter(|(key, _)| under.is_empty() || key.starts_with(&format!("{under}/")));
        Ok(within.map(|(key, (_, tag))| (key.clone(), tag.clone())).collect())
    }

    fn head(&self, key: &str) -> Result<Tag> {
        self.found(key).map(|(_, tag)| tag)
    }

    fn get(&self, key: &str) -> Result<(Vec<u8>, Tag)> {
        self.found(key)
    }

    fn read(&self, key: &str, of: &Tag, range: Range<u64>, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (mut bytes, tag) = self.found(key)?;
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
        match end < range.end {
            true => Err(Error::unavailable("the connection broke")),
            false => Ok(()),
        }
    }

    fn put(&self, key: &str, bytes: Vec<u8>, over: &Over) -> Result<Tag> {
        self.may_write()?;
        let mut kept = self.kept.lock().unwrap();
        let stands = kept.get(key).map(|(_, tag)| tag.e_tag.clone());
        let may = match over {
            Over::Anything => true,
            Over::Nothing => stands.is_none(),
            Over::This(tag) => stands == Some(tag.e_tag.clone()),
        };
        if !may && !self.ignores_conditions.load(SeqCst) {
            return Err(Error::conflict(format!("{key}: another object stands there")));
        }
        let tag = Tag {
            e_tag: Some(format!("e{}", self.writes.fetch_add(1, SeqCst))),
            generation: None,
            bytes: bytes.len() as u64,
            modified_ms: self.clock_ms.load(SeqCst) as i64,
        };
        kept.insert(key.into(), (bytes, tag.clone()));
        if *over != Over::Anything && self.loses_answer.swap(false, SeqCst) {
            // What a repetition of the request then gets.
            return Err(Error::conflict(format!("{key}: another object stands there")));
        }
        Ok(tag)
    }

    fn upload(&self, key: &str, file: &Path) -> Result<()> {
        self.put(key, std::fs::read(file).unwrap(), &Over::Anything).map(drop)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.may_write()?;
        self.kept.lock().unwrap().remove(key);
        Ok(())
    }
}
