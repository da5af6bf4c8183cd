//! Simulated network faults between processes.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::Duration;

/// A proxy for a port of this machine that can cut connections, or drop data silently.
pub struct Wire {
    port: u16,
    open: Arc<Mutex<Option<Vec<TcpStream>>>>,
    swallows: Arc<AtomicBool>,
    /// Added delay in milliseconds.
    delay: Arc<AtomicU64>,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl Wire {
    pub fn to(there: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let open = Arc::new(Mutex::new(Some(Vec::new())));
        let (swallows, delay) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let sent = Arc::<Mutex<Vec<u8>>>::default();
        let wire =
            Wire { port, open: open.clone(), swallows: swallows.clone(), delay: delay.clone(), sent: sent.clone() };
        spawn(move || {
            for here in listener.incoming().map_while(std::result::Result::ok) {
                let mut open = open.lock().unwrap();
                // While it is cut, every connection is closed.
                let Some(open) = &mut *open else { continue };
                let Ok(there) = TcpStream::connect(("127.0.0.1", there)) else { continue };
                for (from, to, sent) in [(&here, &there, Some(&sent)), (&there, &here, None)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (swallows, delay, sent) = (swallows.clone(), delay.clone(), sent.cloned());
                    spawn(move || {
                        let mut some = [0; 1 << 16];
                        while let Ok(read @ 1..) = from.read(&mut some) {
                            sleep(Duration::from_millis(delay.load(Ordering::Relaxed)));
                            // Data arrives when the network is repaired, like a TCP retransmission.
                            while swallows.load(Ordering::Relaxed) {
                                sleep(Duration::from_millis(2));
                            }
                            sent.iter().for_each(|sent| sent.lock().unwrap().extend_from_slice(&some[..read]));
                            if to.write_all(&some[..read]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                open.extend([here, there]);
            }
        });
        wire
    }

    /// Closes all connections, also new ones.
    pub fn cut(&self) {
        let open = self.open.lock().unwrap().take();
        open.iter().flatten().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    /// Delays everything in both directions.
    pub fn delay(&self, by: Duration) {
        self.delay.store(by.as_millis() as u64, Ordering::Relaxed);
    }

    /// Drops all data silently; connections stay open.
    pub fn swallow(&self) {
        self.swallows.store(true, Ordering::Relaxed);
    }

    /// Returns the bytes that clients have sent since the last call, connections interleaved.
    pub fn take_sent(&self) -> Vec<u8> {
        std::mem::take(&mut *self.sent.lock().unwrap())
    }

    /// Ends the fault.
    pub fn mend(&self) {
        self.swallows.store(false, Ordering::Relaxed);
        self.open.lock().unwrap().get_or_insert_default();
    }

    /// Returns its address.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns its address as a NATS URL.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }
}
