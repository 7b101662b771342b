pub mod domain;
pub mod driver;
pub mod roles;
