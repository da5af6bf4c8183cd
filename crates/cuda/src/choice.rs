//! Selects the devices that run passes, by configuration and availability.

use std::fmt;
use std::str::FromStr;

use super::memory::Device;
use sterling_core::error::{Error, Result};

/// Configured devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A GPU if a working one exists, otherwise the CPU.
    Auto,
    /// CPU only.
    Cpu,
    /// GPUs with these numbers, each with a partition of the items; opening fails if one of the GPUs is unavailable.
    Cuda(Vec<usize>),
    /// All GPUs of the machine; opening fails if the machine has none.
    All,
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |card: &str| card.trim().strip_prefix("cuda:")?.parse().ok();
        match text {
            "auto" => Ok(Choice::Auto),
            "cpu" => Ok(Choice::Cpu),
            "cuda" => Ok(Choice::Cuda(vec![0])),
            "cuda:all" => Ok(Choice::All),
            _ => {
                let numbers: Option<Vec<usize>> = text.split(',').map(number).collect();
                let numbers = numbers.ok_or_else(|| {
                    let expected = "auto, cpu, cuda:N for GPU number N, cuda:0,cuda:1 for several, or cuda:all";
                    Error::invalid(format!("device: got `{text}`, expected {expected}"))
                })?;
                match (1..numbers.len()).find(|&n| numbers[..n].contains(&numbers[n])) {
                    Some(n) => Err(Error::invalid(format!(
                        "device: `{text}` names cuda:{} twice, expected each GPU once",
                        numbers[n]
                    ))),
                    None => Ok(Choice::Cuda(numbers)),
                }
            }
        }
    }
}

/// One device, or several devices that each have a partition of the items.
#[derive(Clone, Debug)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// Creates a set of devices.
    ///
    /// # Errors
    /// `Invalid` if `devices` is empty.
    pub fn new(devices: Vec<Device>) -> Result<Self> {
        match devices.is_empty() {
            true => Err(Error::invalid("no devices, expected at least one")),
            false => Ok(Devices(devices)),
        }
    }

    /// Returns the device on which users are embedded.
    pub fn first(&self) -> &Device {
        &self.0[0]
    }

    /// Returns all devices.
    pub fn all(&self) -> &[Device] {
        &self.0
    }
}

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        Devices(vec![device])
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(Device::name).collect();
        f.write_str(&names.join(", "))
    }
}

/// Devices that run passes.
#[derive(Clone, Debug, Default)]
pub struct ChosenDevice {
    /// Selected devices; `None` for the CPU.
    pub device: Option<Devices>,
    /// Reason why the CPU was selected although a GPU was preferred.
    pub reason: Option<String>,
}

impl fmt::Display for ChosenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.device, &self.reason) {
            (Some(devices), _) => devices.fmt(f),
            (None, Some(reason)) => write!(f, "cpu ({reason})"),
            (None, None) => f.write_str("cpu"),
        }
    }
}

impl Choice {
    /// Opens the configured devices.
    ///
    /// # Errors
    /// If a GPU was named: the reason why it cannot be used.
    pub fn open(self) -> Result<ChosenDevice> {
        match self {
            Choice::Cpu => Ok(ChosenDevice::default()),
            Choice::Cuda(numbers) => named(numbers),
            Choice::All => named((0..cards()?).collect()),
            Choice::Auto => Ok(match card(0) {
                Ok(device) => ChosenDevice { device: Some(device.into()), reason: None },
                Err(e) => ChosenDevice { device: None, reason: Some(e.to_string()) },
            }),
        }
    }
}

fn named(numbers: Vec<usize>) -> Result<ChosenDevice> {
    let devices = numbers.into_iter().map(card).collect::<Result<Vec<Device>>>()?;
    Ok(ChosenDevice { device: Some(Devices::new(devices)?), reason: None })
}

#[cfg(feature = "cuda")]
fn card(number: usize) -> Result<Device> {
    super::card::Card::open(number).map(Device::new)
}

/// Returns the number of GPUs of the machine.
#[cfg(feature = "cuda")]
fn cards() -> Result<usize> {
    super::card::Card::count()
}

/// Returns the error for requesting a GPU in a build without CUDA.
#[cfg(not(feature = "cuda"))]
pub fn no_cuda() -> Error {
    Error::unsupported("this build has no CUDA, expected a build with the default feature `cuda`")
}

#[cfg(not(feature = "cuda"))]
fn card(_: usize) -> Result<Device> {
    Err(no_cuda())
}

#[cfg(not(feature = "cuda"))]
fn cards() -> Result<usize> {
    card(0).map(|_| 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    #[test]
    fn device_names_are_parsed_or_rejected() {
        let named = |text: &str| text.parse::<Choice>().unwrap();
        assert_eq!([named("auto"), named("cpu"), named("cuda")], [Choice::Auto, Choice::Cpu, Choice::Cuda(vec![0])]);
        assert_eq!([named("cuda:7"), named("cuda:all")], [Choice::Cuda(vec![7]), Choice::All]);
        assert_eq!(
            [named("cuda:1,cuda:0"), named("cuda:2, cuda:3")].map(Some),
            [[1, 0], [2, 3]].map(|n| Some(Choice::Cuda(n.into())))
        );
        let invalid = [
            "",
            "gpu",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "CPU",
            "cuda:99999999999999999999999",
            "cuda:0,",
            "cuda:0,1",
            "cuda:0,cpu",
            "cuda:0,cuda:all",
        ];
        for invalid in invalid {
            let error = invalid.parse::<Choice>().unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.to_string().contains("cuda:N"), "{error}");
        }
        let twice = "cuda:0,cuda:1,cuda:0".parse::<Choice>().unwrap_err();
        assert!(twice.to_string().contains("names cuda:0 twice"), "{twice}");
    }

    /// For machines without GPU, such as the test machines; if there is one, it is opened.
    #[test]
    fn without_a_gpu_auto_has_a_reason_and_a_named_one_is_an_error() {
        let auto = Choice::Auto.open().unwrap();
        if auto.device.is_none() {
            let reason = auto.reason.clone().unwrap();
            assert!(reason.contains("driver") || reason.contains("CUDA") || reason.contains("cuda"), "{reason}");
            assert!(auto.to_string().starts_with("cpu ("), "{auto}");
            assert!(Choice::Cuda(vec![0]).open().is_err() && Choice::All.open().is_err());
        }
        assert_eq!(Choice::Cpu.open().unwrap().to_string(), "cpu");
    }
}
