//! Which device passes run on: what was asked for, and what became of it.

use std::fmt;
use std::str::FromStr;

use super::memory::Device;
use crate::error::{Error, Result};

/// Which device is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// A card where there is one that works, else the CPU.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// The card of this number, or nothing.
    Cuda(usize),
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = || text.strip_prefix("cuda:")?.parse().ok();
        match text {
            "auto" => Ok(Choice::Auto),
            "cpu" => Ok(Choice::Cpu),
            "cuda" => Ok(Choice::Cuda(0)),
            _ => number().map(Choice::Cuda).ok_or_else(|| {
                Error::invalid(format!("device: got `{text}`, expected auto, cpu, or cuda:N for the card of number N"))
            }),
        }
    }
}

/// The device that passes run on.
#[derive(Clone, Debug, Default)]
pub struct ChosenDevice {
    /// None for the CPU.
    pub device: Option<Device>,
    /// Why it is the CPU, where a card would have been taken.
    pub reason: Option<String>,
}

impl fmt::Display for ChosenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.device, &self.reason) {
            (Some(device), _) => f.write_str(&device.name()),
            (None, Some(reason)) => write!(f, "cpu ({reason})"),
            (None, None) => f.write_str("cpu"),
        }
    }
}

impl Choice {
    /// Opens what was asked for.
    ///
    /// # Errors
    /// For a card that was named: why it cannot be used.
    pub fn open(self) -> Result<ChosenDevice> {
        match self {
            Choice::Cpu => Ok(ChosenDevice::default()),
            Choice::Cuda(number) => Ok(ChosenDevice { device: Some(card(number)?), reason: None }),
            Choice::Auto => Ok(match card(0) {
                Ok(device) => ChosenDevice { device: Some(device), reason: None },
                Err(e) => ChosenDevice { device: None, reason: Some(e.to_string()) },
            }),
        }
    }
}

#[cfg(feature = "cuda")]
fn card(number: usize) -> Result<Device> {
    super::card::Card::open(number).map(Device::new)
}

#[cfg(not(feature = "cuda"))]
fn card(_: usize) -> Result<Device> {
    Err(Error::unsupported("this build has no CUDA: build with --features cuda"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::error::Kind;

    #[test]
    fn devices_are_named_or_refused() {
        let named = |text: &str| text.parse::<Choice>().unwrap();
        assert_eq!([named("auto"), named("cpu"), named("cuda")], [Choice::Auto, Choice::Cpu, Choice::Cuda(0)]);
        assert_eq!(named("cuda:7"), Choice::Cuda(7));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:99999999999999999999999"] {
            let error = wrong.parse::<Choice>().unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.to_string().contains("cuda:N"), "{error}");
        }
    }

    /// On a machine without a card, as the tests' own are; where there is one it is opened.
    #[test]
    fn without_a_card_auto_says_why_and_a_named_one_is_an_error() {
        let auto = Choice::Auto.open().unwrap();
        if auto.device.is_none() {
            let reason = auto.reason.clone().unwrap();
            assert!(reason.contains("driver") || reason.contains("CUDA") || reason.contains("cuda"), "{reason}");
            assert!(auto.to_string().starts_with("cpu ("), "{auto}");
            assert!(Choice::Cuda(0).open().is_err());
        }
        assert_eq!(Choice::Cpu.open().unwrap().to_string(), "cpu");
    }
}
