pub mod domain;
pub mod driver;
pub mod inquiry;
pub mod places;
pub mod roles;
pub mod stores;
pub mod waits;
