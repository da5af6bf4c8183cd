//! A network between processes that fails as a test wants it.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::Duration;

/// A way to a port of this machine that can be cut, or swallow what is sent.
pub struct Wire {
    port: u16,
    open: Arc<Mutex<Option<Vec<TcpStream>>>>,
    swallows: Arc<AtomicBool>,
    /// Milliseconds that it takes longer.
    delay: Arc<AtomicU64>,
}

impl Wire {
    pub fn to(there: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let open = Arc::new(Mutex::new(Some(Vec::new())));
        let (swallows, delay) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let wire = Wire { port, open: open.clone(), swallows: swallows.clone(), delay: delay.clone() };
        spawn(move || {
            for here in listener.incoming().map_while(std::result::Result::ok) {
                let mut open = open.lock().unwrap();
                // While it is cut no connection stays.
                let Some(open) = &mut *open else { continue };
                let Ok(there) = TcpStream::connect(("127.0.0.1", there)) else { continue };
                for (from, to) in [(&here, &there), (&there, &here)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (swallows, delay) = (swallows.clone(), delay.clone());
                    spawn(move || {
                        let mut some = [0; 1 << 16];
                        while let Ok(read @ 1..) = from.read(&mut some) {
                            sleep(Duration::from_millis(delay.load(Ordering::Relaxed)));
                            // It comes when the network is whole again, as TCP sends it again.
                            while swallows.load(Ordering::Relaxed) {
                                sleep(Duration::from_millis(2));
                            }
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

    /// Ends all connections, and lets no other stay.
    pub fn cut(&self) {
        let open = self.open.lock().unwrap().take();
        open.iter().flatten().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    /// Everything takes longer, in both directions.
    pub fn delay(&self, by: Duration) {
        self.delay.store(by.as_millis() as u64, Ordering::Relaxed);
    }

    /// Nothing comes through, and nobody is told.
    pub fn swallow(&self) {
        self.swallows.store(true, Ordering::Relaxed);
    }

    /// Lets everything through again.
    pub fn mend(&self) {
        self.swallows.store(false, Ordering::Relaxed);
        self.open.lock().unwrap().get_or_insert_default();
    }

    /// Where it begins.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The same as servers of NATS are named.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }
}
