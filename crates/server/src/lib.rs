//! The HTTP server ([`http`]), the shard router ([`route`]) with the merge of shard answers ([`gather`]), their [`config`] and the
//! [`doctor`]. [`startup::Server`] starts one from a configuration.

pub mod config;
pub mod doctor;
pub mod gather;
pub mod http;
pub mod route;
pub mod startup;
